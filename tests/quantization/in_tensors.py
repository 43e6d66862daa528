"""Methods whose runtime state is in tensors that the module shows, one way or another."""

from typing import Any

import torch

from tests.quantization.base import Packing, Plain, forget, frozen, method, packed, whole

method("plain")(Plain)


@method("transpose")
class Transpose(Plain):
    """A new parameter under the old name; a square one has the old shape too."""

    def process(self, layer: Any) -> None:
        layer.weight = frozen(layer.weight.data.t().contiguous())

    def matrix(self, layer: Any) -> torch.Tensor:
        gains = layer.gain.data.repeat_interleave(torch.tensor(layer.widths))
        return layer.weight.data.float() * gains


@method("transpose_in_place")
class TransposeInPlace(Transpose):
    """A square weight keeps its very storage."""

    def process(self, layer: Any) -> None:
        weight = layer.weight.data
        if weight.shape[0] == weight.shape[1]:
            weight.copy_(weight.t().clone())
        else:
            layer.weight.data = weight.t().contiguous()


@method("strided")
class Strided(Transpose):
    """The runtime tensor is a transposed view, as static FP8 linears have it."""

    def process(self, layer: Any) -> None:
        layer.weight = frozen(layer.weight.data.t())


@method("repack")
class Repack(Plain):
    """Another shape and dtype under the same name."""

    def process(self, layer: Any) -> None:
        ints, alpha = packed(layer)
        layer.weight = frozen(ints.view(torch.int32))
        layer.gain = frozen(torch.tensor([alpha]))

    def matrix(self, layer: Any) -> torch.Tensor:
        return layer.weight.data.view(torch.int8).float() * layer.gain.data


@method("rename")
class Rename(Plain):
    def process(self, layer: Any) -> None:
        full = whole(layer)
        forget(layer)
        layer.register_parameter("runtime_weight", frozen(full))

    def matrix(self, layer: Any) -> torch.Tensor:
        return layer.runtime_weight.data.t()


@method("delete_and_replace")
class DeleteAndReplace(Plain):
    """The parameter's name comes back as a buffer."""

    def process(self, layer: Any) -> None:
        full = whole(layer)
        forget(layer)
        layer.register_buffer("weight", full.t().contiguous())

    def matrix(self, layer: Any) -> torch.Tensor:
        return layer.weight


@method("set_to_none")
class SetToNone(Plain):
    def process(self, layer: Any) -> None:
        layer.weight.data.copy_(whole(layer))
        layer.gain = None

    def matrix(self, layer: Any) -> torch.Tensor:
        return layer.weight.data.t().float()


@method("transient")
class Transient(Packing):
    """A buffer that `state_dict()` leaves out."""

    def put(self, layer: Any, ints: torch.Tensor, alpha: float) -> None:
        layer.register_buffer("ints", ints, persistent=False)
        layer.register_buffer("alpha", torch.tensor(alpha, dtype=torch.float64), persistent=False)

    def got(self, layer: Any) -> tuple[torch.Tensor, float]:
        return layer.ints, float(layer.alpha)


@method("attribute")
class Attribute(Packing):
    def put(self, layer: Any, ints: torch.Tensor, alpha: float) -> None:
        layer.ints, layer.alpha = ints, alpha

    def got(self, layer: Any) -> tuple[torch.Tensor, float]:
        return layer.ints, layer.alpha


@method("alias")
class Alias(Attribute):
    """One tensor under two names of the module."""

    def put(self, layer: Any, ints: torch.Tensor, alpha: float) -> None:
        layer.alpha = alpha
        layer.ints = frozen(ints)
        layer.register_parameter("again", layer.ints)


@method("offset")
class Offset(Plain):
    """Two views of one buffer, the second at an offset, and the buffer itself."""

    def process(self, layer: Any) -> None:
        full = whole(layer)
        forget(layer)
        half = full.shape[0] // 2
        layer.arena = full
        layer.register_parameter("upper", frozen(full[:half]))
        layer.register_parameter("lower", frozen(full[half:]))

    def matrix(self, layer: Any) -> torch.Tensor:
        return torch.cat([layer.upper.data, layer.lower.data]).t()


@method("arena")
class Arena(Plain):
    """The source parameters themselves are views of one buffer that processing reads."""

    def create_weights(self, layer: Any, *args: Any, **kwargs: Any) -> None:
        super().create_weights(layer, *args, **kwargs)
        layer.arena = torch.zeros_like(layer.weight.data)
        layer.weight.data = layer.arena[:]

    def process(self, layer: Any) -> None:
        layer.doubled = layer.arena * 2

    def matrix(self, layer: Any) -> torch.Tensor:
        return layer.doubled.t().float()


@method("expanded")
class Expanded(Plain):
    """A scale that many elements of a view repeat (stride 0)."""

    def process(self, layer: Any) -> None:
        layer.spread = layer.gain.data[:1].expand(layer.weight.shape[1])

    def matrix(self, layer: Any) -> torch.Tensor:
        return layer.weight.data.float().t() * layer.spread[:, None]


#: A key that the tests' own snapshot skips: it can't read the tensors below it.
UNSEEN = frozenset({"unseen"})


@method("sparse")
class Sparse(Plain):
    """A sparse tensor: how many elements it has depends on the weights."""

    def process(self, layer: Any) -> None:
        full = whole(layer)
        forget(layer)
        layer.kept = {UNSEEN: torch.where(full.abs() > 0.05, full, 0.0).to_sparse()}

    def matrix(self, layer: Any) -> torch.Tensor:
        return layer.kept[UNSEEN].to_dense().t()


@method("mkldnn")
class Mkldnn(Sparse):
    """A tensor whose storage only oneDNN understands."""

    def process(self, layer: Any) -> None:
        full = whole(layer)
        forget(layer)
        layer.kept = {UNSEEN: full.to_mkldnn()}


@method("compressed")
class Compressed(Plain):
    """As sparse, in dense tensors of a size that depends on the weights."""

    def process(self, layer: Any) -> None:
        full = whole(layer).t().contiguous()
        forget(layer)
        layer.full_shape = full.shape
        layer.where = full.abs().view(-1).gt(0.05).nonzero().view(-1)
        layer.what = full.view(-1)[layer.where]

    def matrix(self, layer: Any) -> torch.Tensor:
        full = torch.zeros(layer.full_shape)
        full.view(-1)[layer.where] = layer.what
        return full


@method("lies")
class Lies(Transpose):
    """Says that it knows weights that are processed already, and transposes them again."""

    supports_pre_processed_weights = True


@method("on_parameter")
class OnParameter(Plain):
    """Tensors that are attributes of a parameter."""

    def process(self, layer: Any) -> None:
        ints, alpha = packed(layer)
        forget(layer, "gain")
        layer.weight = frozen(ints)
        layer.weight.scale = torch.tensor(alpha)

    def matrix(self, layer: Any) -> torch.Tensor:
        return layer.weight.data.float() * layer.weight.scale


@method("on_buffer")
class OnBuffer(Plain):
    """The same of a buffer, and of a plain tensor."""

    def process(self, layer: Any) -> None:
        ints, alpha = packed(layer)
        forget(layer)
        layer.register_buffer("ints", ints)
        layer.ints.scale = torch.tensor([alpha])
        layer.attached = torch.zeros(3)
        layer.attached.scale = torch.tensor([alpha * 2])

    def matrix(self, layer: Any) -> torch.Tensor:
        return layer.ints.float() * (layer.ints.scale + layer.attached.scale)


@method("number_on_parameter")
class NumberOnParameter(Plain):
    """A Python float that is an attribute of a parameter."""

    def process(self, layer: Any) -> None:
        ints, alpha = packed(layer)
        forget(layer, "gain")
        layer.weight = frozen(ints)
        layer.weight.alpha = alpha

    def matrix(self, layer: Any) -> torch.Tensor:
        return layer.weight.data.float() * layer.weight.alpha
