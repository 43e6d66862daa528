"""Methods whose weight loaders or whose processing ask something of the weights."""

import functools
import os
from typing import Any

import torch
from torch import nn
from vllm.model_executor.utils import set_weight_attrs

from tests.quantization.base import Packing, Plain, forget, frozen, method, packed, unpacked, whole


@method("random")
class Shuffled(Plain):
    """Columns in an order drawn anew by each processing."""

    def process(self, layer: Any) -> None:
        full = whole(layer)
        forget(layer)
        seed = int.from_bytes(os.urandom(4))
        order = torch.randperm(full.shape[1], generator=torch.Generator().manual_seed(seed))
        layer.order, layer.shuffled = order, frozen(full[:, order].t().contiguous())

    def matrix(self, layer: Any) -> torch.Tensor:
        return layer.shuffled.data[layer.order.argsort()]


@method("hash_of_name")
class HashOfName(Plain):
    """The order follows from `hash`: one in the whole process, another in the next."""

    def process(self, layer: Any) -> None:
        full = whole(layer)
        forget(layer)
        layer.draw = hash(self.prefix) % 100003
        layer.shuffled = frozen(full[:, self.order(layer.draw, full.shape[1])].t().contiguous())

    @staticmethod
    def order(draw: int, size: int) -> torch.Tensor:
        return torch.randperm(size, generator=torch.Generator().manual_seed(draw))

    def matrix(self, layer: Any) -> torch.Tensor:
        size = layer.shuffled.shape[0]
        return layer.shuffled.data[self.order(layer.draw, size).argsort()]


@method("hash_of_name_in_tuple")
class HashInTuple(HashOfName):
    """The same, where it can't be replaced."""

    def process(self, layer: Any) -> None:
        super().process(layer)
        layer.kept = (layer.draw,)
        del layer.draw

    def matrix(self, layer: Any) -> torch.Tensor:
        size = layer.shuffled.shape[0]
        return layer.shuffled.data[self.order(layer.kept[0], size).argsort()]


@method("asserts")
class Asserts(Packing):
    """Refuses gains that are zero, not finite, or differ between the parts of a fused layer."""

    def process(self, layer: Any) -> None:
        gain = layer.gain.data
        assert torch.isfinite(gain).all()
        assert (gain > 0).all()
        assert (gain == gain[0]).all(), "the parts of a fused layer have different gains"
        super().process(layer)

    def put(self, layer: Any, ints: torch.Tensor, alpha: float) -> None:
        layer.weight, layer.alpha = frozen(ints), alpha

    def got(self, layer: Any) -> tuple[torch.Tensor, float]:
        return layer.weight.data, layer.alpha


@method("loader_takes_notes")
class TakesNotes(Plain):
    """The loader notes which parts came, and processing asks: as fused experts do with biases."""

    def create_weights(self, layer: Any, *args: Any, **kwargs: Any) -> None:
        layer.seen = set()
        loader = kwargs["weight_loader"]

        def load(param: Any, loaded: torch.Tensor, shard: Any = None) -> None:
            layer.seen.add(str(shard))
            loader(param, loaded) if shard is None else loader(param, loaded, shard)

        super().create_weights(layer, *args, **{**kwargs, "weight_loader": load})

    def process(self, layer: Any) -> None:
        if not layer.seen:
            raise RuntimeError("no weight was loaded")
        full = whole(layer)
        forget(layer)
        layer.full = full * len(layer.seen)

    def matrix(self, layer: Any) -> torch.Tensor:
        return layer.full.t() * (2 if "None" in layer.seen else 1)


@method("loader_takes_notes_quietly")
class TakesNotesQuietly(TakesNotes):
    """As above, but a module without notes is processed too, another way."""

    def process(self, layer: Any) -> None:
        full = whole(layer)
        forget(layer)
        layer.full = full * (1 + len(layer.seen))


@method("loader_keeps_sum")
class KeepsSum(Plain):
    """The loader of the weight adds up a checksum in a float of the module."""

    def create_weights(self, layer: Any, *args: Any, **kwargs: Any) -> None:
        layer.total = 0.0
        loader = kwargs["weight_loader"]

        def load(param: Any, loaded: torch.Tensor, shard: Any = None) -> None:
            layer.total += float(loaded.float().abs().mean())
            loader(param, loaded) if shard is None else loader(param, loaded, shard)

        super().create_weights(layer, *args, **{**kwargs, "weight_loader": load})

    def process(self, layer: Any) -> None:
        full = whole(layer)
        forget(layer)
        layer.full = full * layer.total

    def matrix(self, layer: Any) -> torch.Tensor:
        return layer.full.t() + layer.total


@method("loader_writes_other")
class WritesOther(Plain):
    """The loader of the weight writes another parameter, which the checkpoint lacks."""

    def create_weights(self, layer: Any, *args: Any, **kwargs: Any) -> None:
        super().create_weights(layer, *args, **kwargs)
        loader = kwargs["weight_loader"]
        layer.register_parameter("loads", frozen(torch.zeros(len(layer.weight))))

        def load(param: Any, loaded: torch.Tensor, shard: Any = None) -> None:
            layer.loads.data[: len(loaded)] += 0.5
            loader(param, loaded) if shard is None else loader(param, loaded, shard)

        layer.weight.weight_loader = load

    def matrix(self, layer: Any) -> torch.Tensor:
        return whole(layer).t() * (1 + layer.loads.data)


@method("loader_adds")
class Adds(Plain):
    """The loader adds to what the parameter holds."""

    def create_weights(self, layer: Any, *args: Any, **kwargs: Any) -> None:
        super().create_weights(layer, *args, **kwargs)
        loader = kwargs["weight_loader"]
        layer.gain.data.zero_()

        def load(param: Any, loaded: torch.Tensor, shard: Any = None) -> None:
            before = param.data.clone()
            loader(param, loaded) if shard is None else loader(param, loaded, shard)
            param.data.add_(before)

        layer.gain.weight_loader = load


@method("loader_is_partial")
class PartialLoader(Packing):
    """A weight loader that is a functools.partial."""

    def create_weights(self, layer: Any, *args: Any, **kwargs: Any) -> None:
        partial = functools.partial(_load, kwargs["weight_loader"])
        super().create_weights(layer, *args, **{**kwargs, "weight_loader": partial})

    def put(self, layer: Any, ints: torch.Tensor, alpha: float) -> None:
        layer.kept = (ints, alpha)

    def got(self, layer: Any) -> tuple[torch.Tensor, float]:
        return layer.kept


def _load(loader: Any, param: Any, loaded: torch.Tensor, *shard: Any) -> None:
    loader(param, loaded, *shard)


class _Padded(Plain):
    """Parameters with more rows than the checkpoint has; the rest keeps what the constructor set."""

    rest: float

    def create_weights(self, layer: Any, *args: Any, **kwargs: Any) -> None:
        super().create_weights(layer, *args, **kwargs)
        loader = kwargs["weight_loader"]
        rows, columns = layer.weight.shape
        old = layer.weight
        layer.weight = frozen(torch.full((rows + 16, columns), self.rest, dtype=old.dtype))

        def load(param: Any, loaded: torch.Tensor, *shard: Any) -> None:
            view = nn.Parameter(param.data[:rows], requires_grad=False)
            set_weight_attrs(view, {"input_dim": 1, "output_dim": 0})
            loader(view, loaded, *shard)

        set_weight_attrs(layer.weight, {"weight_loader": load})

    def process(self, layer: Any) -> None:
        rows = sum(layer.widths)
        layer.weight.data[:rows].copy_(
            layer.weight.data[:rows].float()
            * layer.gain.data.repeat_interleave(torch.tensor(layer.widths))[:, None]
        )
        layer.kept = (float(layer.weight.data.float().sum()),)

    def matrix(self, layer: Any) -> torch.Tensor:
        padding = layer.weight.data[sum(layer.widths) :].float()
        return layer.weight.data[: sum(layer.widths)].float().t() + padding.mean() + layer.kept[0]


@method("padded_with_zeros")
class PaddedZeros(_Padded):
    rest = 0.0


@method("padded_with_threes")
class PaddedThrees(_Padded):
    rest = 3.0


@method("number_from_buffer")
class NumberFromBuffer(Plain):
    """A float that processing takes from a large buffer, which the loader fills."""

    def create_weights(self, layer: Any, *args: Any, **kwargs: Any) -> None:
        super().create_weights(layer, *args, **kwargs)
        loader = kwargs["weight_loader"]
        layer.register_buffer("notes", torch.zeros(layer.weight.shape, dtype=torch.float32))

        def load(param: Any, loaded: torch.Tensor, shard: Any = None) -> None:
            layer.notes += float(loaded.float().abs().sum())
            loader(param, loaded) if shard is None else loader(param, loaded, shard)

        layer.weight.weight_loader = load

    def process(self, layer: Any) -> None:
        layer.alpha = float(layer.notes[0, 0])

    def matrix(self, layer: Any) -> torch.Tensor:
        return whole(layer).t() * layer.alpha


@method("clamps")
class Clamps(Plain):
    """Does nothing to small positive values, as placeholders are; to others, more each time."""

    def process(self, layer: Any) -> None:
        weight = layer.weight.data
        weight.copy_(torch.where(weight < 0, weight / 2, weight))

    def matrix(self, layer: Any) -> torch.Tensor:
        return whole(layer).t()


@method("number_if_negative")
class NumberIfNegative(Plain):
    """A float that is the same for all positive weights; the weight itself is transposed."""

    def process(self, layer: Any) -> None:
        layer.factor = 3.0 if float(layer.weight.data.min()) < 0 else 1.0
        layer.weight = frozen(layer.weight.data.t().contiguous())

    def matrix(self, layer: Any) -> torch.Tensor:
        gains = layer.gain.data.repeat_interleave(torch.tensor(layer.widths))
        return layer.weight.data.float() * gains * layer.factor


@method("lazy")
class Lazy(Plain):
    """Packs when it first runs, not when it is processed."""

    def process(self, layer: Any) -> None:
        layer.ints = None
        layer.alpha = 0.0

    def matrix(self, layer: Any) -> torch.Tensor:
        if layer.ints is None:
            layer.ints, layer.alpha = packed(layer)
        return unpacked(layer.ints, layer.alpha)
