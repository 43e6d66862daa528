"""The behaviours, each of which some CUDA method of vLLM shows."""

import functools
import itertools
import random
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from vllm.model_executor.utils import is_weights_pre_processed

from tests.methods.base import Behaviour, parameter

BEHAVIOURS: dict[str, type[Behaviour]] = {}


def _behaviour(cls: type[Behaviour]) -> type[Behaviour]:
    BEHAVIOURS[cls.name] = cls
    return cls


def _empty(layer: nn.Module) -> None:
    layer.weight = parameter(torch.empty(0, dtype=torch.bfloat16))


@_behaviour
class Transpose(Behaviour):
    """In place: the same name, another shape, or the same shape where the weight is square."""

    name = "transpose"

    def repack(self, layer: nn.Module, weight: torch.Tensor) -> None:
        layer.weight.data = weight.t().contiguous()

    def multiply(self, layer: nn.Module, x: torch.Tensor) -> torch.Tensor:
        return x @ layer.weight


@_behaviour
class TransposedView(Transpose):
    """As FP8 linears on CUDA: the transposed view, not contiguous."""

    name = "transposed_view"

    def repack(self, layer: nn.Module, weight: torch.Tensor) -> None:
        layer.weight = parameter(weight.t())


@_behaviour
class Repack(Behaviour):
    """The same name, another shape and dtype."""

    name = "repack"

    def repack(self, layer: nn.Module, weight: torch.Tensor) -> None:
        layer.rows = weight.shape[0]
        layer.weight = parameter(weight.flip(0).contiguous().view(torch.int32).reshape(-1))

    def multiply(self, layer: nn.Module, x: torch.Tensor) -> torch.Tensor:
        return x @ layer.weight.view(torch.bfloat16).reshape(layer.rows, -1).flip(0).t()


@_behaviour
class Rename(Behaviour):
    name = "rename"

    def repack(self, layer: nn.Module, weight: torch.Tensor) -> None:
        del layer.weight
        layer.register_parameter("qweight", parameter(weight.t().contiguous()))

    def multiply(self, layer: nn.Module, x: torch.Tensor) -> torch.Tensor:
        return x @ layer.qweight


@_behaviour
class Replace(Behaviour):
    """Delete one parameter, and put two buffers and a None in its place."""

    name = "replace"

    def repack(self, layer: nn.Module, weight: torch.Tensor) -> None:
        del layer.weight
        layer.register_buffer("scale", weight.abs().amax(1, keepdim=True).float())
        layer.register_buffer("unit", weight.float() / layer.scale, persistent=False)
        layer.weight = None

    def multiply(self, layer: nn.Module, x: torch.Tensor) -> torch.Tensor:
        return (x.float() @ (layer.unit * layer.scale).t()).to(x.dtype)


class _Holder:
    def __init__(self, packed: torch.Tensor) -> None:
        self.packed = packed


@dataclass
class _Pack:
    packed: torch.Tensor
    columns: int


@_behaviour
class OnHelper(Behaviour):
    """The packed weight lies on a helper object of the layer, the parameter is emptied."""

    name = "on_helper"

    def repack(self, layer: nn.Module, weight: torch.Tensor) -> None:
        layer.helper = _Holder(weight.t().contiguous())
        _empty(layer)

    def multiply(self, layer: nn.Module, x: torch.Tensor) -> torch.Tensor:
        return x @ layer.helper.packed


@_behaviour
class OnMethod(Behaviour):
    """The packed weight lies on the quantization method, which belongs to this one layer."""

    name = "on_method"

    def repack(self, layer: nn.Module, weight: torch.Tensor) -> None:
        self.packed = weight.t().contiguous()
        _empty(layer)

    def multiply(self, layer: nn.Module, x: torch.Tensor) -> torch.Tensor:
        return x @ self.packed


@_behaviour
class InDict(Behaviour):
    name = "in_dict"

    def repack(self, layer: nn.Module, weight: torch.Tensor) -> None:
        half = weight.shape[1] // 2
        layer.packed = {"left": weight[:, :half].t().contiguous(), "rest": [weight[:, half:].t()]}
        _empty(layer)

    def multiply(self, layer: nn.Module, x: torch.Tensor) -> torch.Tensor:
        return x @ torch.cat([layer.packed["left"], *layer.packed["rest"]])


@_behaviour
class InDataclass(Behaviour):
    name = "in_dataclass"

    def repack(self, layer: nn.Module, weight: torch.Tensor) -> None:
        layer.pack = _Pack(weight.t().contiguous(), weight.shape[1])
        _empty(layer)

    def multiply(self, layer: nn.Module, x: torch.Tensor) -> torch.Tensor:
        return x[:, : layer.pack.columns] @ layer.pack.packed


@_behaviour
class PythonFloat(Behaviour):
    """A float that is derived from the weights, and weights that make no sense without it."""

    name = "python_float"

    def repack(self, layer: nn.Module, weight: torch.Tensor) -> None:
        layer.peak_float = weight.abs().max().item()
        layer.weight.data = weight / layer.peak_float

    def multiply(self, layer: nn.Module, x: torch.Tensor) -> torch.Tensor:
        return x @ layer.weight.t() * layer.peak_float


@_behaviour
class Alias(Behaviour):
    """One tensor under two names, the new one sorted before the old one."""

    name = "alias"

    def repack(self, layer: nn.Module, weight: torch.Tensor) -> None:
        layer.weight.data = weight.t().contiguous()
        layer.register_parameter("also", layer.weight)

    def multiply(self, layer: nn.Module, x: torch.Tensor) -> torch.Tensor:
        return x @ ((layer.also + layer.weight) / 2)


@_behaviour
class Offset(Behaviour):
    """Two tensors that share one storage, each at an offset."""

    name = "offset"

    def repack(self, layer: nn.Module, weight: torch.Tensor) -> None:
        rows, columns = weight.shape
        storage = torch.empty(16 + rows * columns, dtype=weight.dtype)
        storage[8:16] = weight.flatten()[:8]
        storage[16:] = weight.t().flatten()
        layer.weight = parameter(storage[16:].view(columns, rows))
        layer.first = storage[8:16]

    def multiply(self, layer: nn.Module, x: torch.Tensor) -> torch.Tensor:
        return x @ layer.weight + layer.first.sum()


@_behaviour
class PreProcessed(Transpose):
    """Declares `supports_pre_processed_weights`, and means it."""

    name = "pre_processed"
    supports_pre_processed_weights = True

    def repack(self, layer: nn.Module, weight: torch.Tensor) -> None:
        if not is_weights_pre_processed():
            super().repack(layer, weight)


@_behaviour
class PreProcessedLie(Transpose):
    """Declares `supports_pre_processed_weights`, and transposes all the same."""

    name = "pre_processed_lie"
    supports_pre_processed_weights = True


@_behaviour
class Asserting(Behaviour):
    """Refuses weights that no real checkpoint has: NaN, all zero, or all equal."""

    name = "asserting"

    def repack(self, layer: nn.Module, weight: torch.Tensor) -> None:
        assert torch.isfinite(weight).all()
        assert weight.abs().sum() > 0
        assert weight.unique().numel() > 1
        layer.weight.data = weight.t().contiguous()

    def multiply(self, layer: nn.Module, x: torch.Tensor) -> torch.Tensor:
        return x @ layer.weight


def _closure(packed: torch.Tensor) -> Callable[[torch.Tensor], torch.Tensor]:
    return lambda x: x @ packed


@_behaviour
class InClosure(Behaviour):
    name = "in_closure"

    def repack(self, layer: nn.Module, weight: torch.Tensor) -> None:
        layer.run = _closure(weight.t().contiguous())
        _empty(layer)

    def multiply(self, layer: nn.Module, x: torch.Tensor) -> torch.Tensor:
        result: torch.Tensor = layer.run(x)
        return result


@_behaviour
class InPartial(InClosure):
    name = "in_partial"

    def repack(self, layer: nn.Module, weight: torch.Tensor) -> None:
        layer.run = functools.partial(nn.functional.linear, weight=weight.clone())
        _empty(layer)


@_behaviour
class ShapeOfValues(Behaviour):
    """Keeps the rows that matter: the shape is decided by the values, so no rehearsal knows it."""

    name = "shape_of_values"
    runtime = False

    def repack(self, layer: nn.Module, weight: torch.Tensor) -> None:
        norms = weight.float().norm(dim=1)
        kept = norms > norms.median()
        layer.rows = weight.shape[0]
        layer.kept = kept.nonzero().flatten()
        threshold = weight.abs().max() / 4
        layer.large = (weight[kept].abs() > threshold).nonzero()
        layer.weight = parameter(weight[kept].clone())

    def multiply(self, layer: nn.Module, x: torch.Tensor) -> torch.Tensor:
        out = x.new_zeros(x.shape[0], layer.rows)
        out[:, layer.kept] = x @ layer.weight.t() + layer.large.shape[0]
        return out


@_behaviour
class Opaque(Behaviour):
    """What a native handle does: the bytes can be used, not read."""

    name = "opaque"
    runtime = False

    def repack(self, layer: nn.Module, weight: torch.Tensor) -> None:
        layer.handle = itertools.cycle([weight.t().contiguous()])
        _empty(layer)

    def multiply(self, layer: nn.Module, x: torch.Tensor) -> torch.Tensor:
        return x @ next(layer.handle)


@_behaviour
class OpaqueDither(Opaque):
    """Packed away, and not the same twice: no layout can hold that."""

    name = "opaque_dither"
    auto = runtime = source = False

    def repack(self, layer: nn.Module, weight: torch.Tensor) -> None:
        noise = torch.randn(weight.shape, generator=torch.Generator().manual_seed(_next()))
        super().repack(layer, weight + noise.to(weight.dtype))


_COUNT = itertools.count()


def _next() -> int:
    return next(_COUNT)


class _Node:
    def __init__(self, name: str, held: Any) -> None:
        setattr(self, name, held)


def _wrap(tensor: torch.Tensor, choose: random.Random) -> tuple[Any, Callable[[Any], Any]]:
    """`tensor` at a random depth in random containers, and how to get at it."""
    held: Any = tensor

    def get(value: Any) -> Any:
        return value

    for _ in range(choose.randint(1, 5)):
        inner = get
        name = "".join(choose.choices("abcdefgh", k=6))
        shape = choose.choice(["list", "tuple", "dict", "object", "partial", "closure"])
        if shape == "list":
            held, get = [None, held], lambda v, inner=inner: inner(v[1])
        elif shape == "tuple":
            held, get = (held, 3), lambda v, inner=inner: inner(v[0])
        elif shape == "dict":
            held, get = {name: held}, lambda v, inner=inner, name=name: inner(v[name])
        elif shape == "object":
            held = _Node(name, held)
            get = lambda v, inner=inner, name=name: inner(getattr(v, name))  # noqa: E731
        elif shape == "partial":
            held = functools.partial(_same, held)
            get = lambda v, inner=inner: inner(v())  # noqa: E731
        else:
            held = functools.partial(_call, _keep(held))
            get = lambda v, inner=inner: inner(v())  # noqa: E731
    return held, get


def _same(value: Any) -> Any:
    return value


def _keep(value: Any) -> Callable[[], Any]:
    return lambda: value


def _call(function: Callable[[], Any]) -> Any:
    return function()


def _random(seed: int) -> None:
    class Hidden(Behaviour):
        name = f"random_{seed}"
        __doc__ = f"The weight in containers that seed {seed} chooses."

        def repack(self, layer: nn.Module, weight: torch.Tensor) -> None:
            choose = random.Random(seed)
            self.place = "".join(choose.choices("klmnop", k=8))
            held, self.get = _wrap(weight.t().contiguous(), choose)
            setattr(layer, self.place, held)
            _empty(layer)

        def multiply(self, layer: nn.Module, x: torch.Tensor) -> torch.Tensor:
            result: torch.Tensor = x @ self.get(getattr(layer, self.place))
            return result

    _behaviour(Hidden)


for _seed in range(6):
    _random(_seed)
