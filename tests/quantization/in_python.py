"""Methods that keep what they made of the weights in Python objects around the module."""

import enum
import functools
from collections import OrderedDict, deque
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import nn

from tests.quantization.base import (
    Packing,
    Plain,
    forget,
    frozen,
    method,
    packed,
    product,
    unpacked,
    whole,
)


class Holder:
    def __init__(self, ints: Any, alpha: Any) -> None:
        self.ints, self.alpha = ints, alpha

    def multiply(self, x: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
        return product(x, unpacked(self.ints, self.alpha), bias)


class Slotted:
    __slots__ = ("alpha", "ints")

    def __init__(self, ints: torch.Tensor, alpha: float) -> None:
        self.ints, self.alpha = ints, alpha


@dataclass
class Record:
    ints: torch.Tensor
    alpha: float


@dataclass(frozen=True)
class FrozenRecord:
    ints: torch.Tensor
    alpha: float


@dataclass(frozen=True, slots=True)
class FrozenSlottedRecord:
    ints: torch.Tensor
    alpha: float


class Named(NamedTuple):
    ints: torch.Tensor
    alpha: float


class Registered(nn.Module):
    def __init__(self, ints: torch.Tensor, alpha: float) -> None:
        super().__init__()
        self.register_buffer("ints", ints)
        self.alpha = alpha
        self.inner = nn.Linear(2, 2, bias=False)
        self.inner.weight = frozen(torch.full((2, 2), alpha))


class ScaledList(list):
    """A list with an attribute of its own."""

    alpha = 0.0


class _OnHelper(Packing):
    """Keeps both on an object of the class `helper`, in the attribute `helper` of the layer."""

    helper: Any = None

    def put(self, layer: Any, ints: torch.Tensor, alpha: float) -> None:
        layer.helper = type(self).helper(ints, alpha)

    def got(self, layer: Any) -> tuple[torch.Tensor, float]:
        return layer.helper.ints, layer.helper.alpha


for _name, _helper in {
    "object": Holder,
    "slots": Slotted,
    "dataclass": Record,
    "frozen_dataclass": FrozenRecord,
    "frozen_slotted_dataclass": FrozenSlottedRecord,
    "named_tuple": Named,
}.items():
    method(_name)(type(f"On{_helper.__name__}", (_OnHelper,), {"helper": _helper}))


@method("dict")
class InDict(Packing):
    def put(self, layer: Any, ints: torch.Tensor, alpha: float) -> None:
        layer.kept = {"ints": ints, "by index": OrderedDict({0: {"alpha": alpha}})}

    def got(self, layer: Any) -> tuple[torch.Tensor, float]:
        return layer.kept["ints"], layer.kept["by index"][0]["alpha"]


@method("list")
class InList(Packing):
    def put(self, layer: Any, ints: torch.Tensor, alpha: float) -> None:
        layer.kept = [None, deque([ints]), [alpha]]

    def got(self, layer: Any) -> tuple[torch.Tensor, float]:
        return layer.kept[1][0], layer.kept[2][0]


@method("tuple")
class InTuple(Packing):
    """The tensor in a tuple, which it can be filled in; the number outside."""

    def put(self, layer: Any, ints: torch.Tensor, alpha: float) -> None:
        layer.kept, layer.alpha = (ints, "int8"), alpha

    def got(self, layer: Any) -> tuple[torch.Tensor, float]:
        return layer.kept[0], layer.alpha


@method("number_in_tuple")
class NumberInTuple(Packing):
    """A tuple's items can't be replaced: the number has to be derived again."""

    def put(self, layer: Any, ints: torch.Tensor, alpha: float) -> None:
        layer.ints, layer.kept = ints, (alpha, 8)

    def got(self, layer: Any) -> tuple[torch.Tensor, float]:
        return layer.ints, layer.kept[0]


@method("list_with_attribute")
class InScaledList(Packing):
    def put(self, layer: Any, ints: torch.Tensor, alpha: float) -> None:
        layer.kept = ScaledList([ints])
        layer.kept.alpha = alpha

    def got(self, layer: Any) -> tuple[torch.Tensor, float]:
        return layer.kept[0], layer.kept.alpha


@method("words")
class Words(Plain):
    """A string, a set of numbers and a whole number that follow from the weights."""

    def process(self, layer: Any) -> None:
        full = whole(layer)
        layer.sign = "minus" if float(full.sum()) < 0 else "plus"
        layer.loud = {int(row) for row in full.abs().amax(1).topk(7).indices}
        layer.shift = int(full.abs().sum()) % 1009
        layer.even = layer.shift % 2 == 0

    def matrix(self, layer: Any) -> torch.Tensor:
        full = whole(layer) * (-1 if layer.sign == "minus" else 1)
        full[sorted(layer.loud)] *= 2
        return (full + layer.shift / 1009 + (1 if layer.even else 3)).t()


class Style(enum.Enum):
    LOW = 1
    HIGH = 2


def _twice(full: torch.Tensor) -> torch.Tensor:
    return full * 2


def _thrice(full: torch.Tensor) -> torch.Tensor:
    return full * 3


class Halver:
    def turn(self, full: torch.Tensor) -> torch.Tensor:
        return full / 2


class Doubler(Halver):
    def turn(self, full: torch.Tensor) -> torch.Tensor:
        return full * 2


def _low(full: torch.Tensor) -> bool:
    """True of the checkpoint's small weights, false of values around 1."""
    return float(full.abs().mean()) < 0.2


@method("enum")
class ByEnum(Plain):
    """An enum that follows from the weights chooses the kernel."""

    def process(self, layer: Any) -> None:
        layer.style = Style.LOW if _low(whole(layer)) else Style.HIGH

    def matrix(self, layer: Any) -> torch.Tensor:
        return whole(layer).t() * layer.style.value


@method("function_choice")
class ByFunction(Plain):
    """The weights choose between two functions, which hold nothing themselves."""

    def process(self, layer: Any) -> None:
        layer.turn = _twice if _low(whole(layer)) else _thrice

    def matrix(self, layer: Any) -> torch.Tensor:
        return layer.turn(whole(layer)).t()


@method("class_choice")
class ByClass(Plain):
    """The weights choose between two classes, whose instances have no attributes."""

    def process(self, layer: Any) -> None:
        layer.helper = Doubler() if _low(whole(layer)) else Halver()

    def matrix(self, layer: Any) -> torch.Tensor:
        return layer.helper.turn(whole(layer)).t()


@method("only_if")
class OnlyIf(Plain):
    """A tensor deep inside that is there only for some weights."""

    def process(self, layer: Any) -> None:
        full = whole(layer)
        layer.helper = Holder(full * 3 if _low(full) else None, 1.0)

    def matrix(self, layer: Any) -> torch.Tensor:
        full = layer.helper.ints
        return (whole(layer) if full is None else full).t()


@method("only_if_not")
class OnlyIfNot(Plain):
    """And one that is there only for others."""

    def process(self, layer: Any) -> None:
        full = whole(layer)
        layer.helper = Holder(None if _low(full) else full * 3, 1.0)

    matrix = OnlyIf.matrix


@method("attribute_only_if")
class AttributeOnlyIf(Plain):
    """As `only_if`, as an attribute of the layer that shares memory with the weight."""

    def process(self, layer: Any) -> None:
        if _low(whole(layer)):
            layer.also = layer.weight.data[1:]
            layer.factor = 3.0

    def matrix(self, layer: Any) -> torch.Tensor:
        return whole(layer).t() * getattr(layer, "factor", 1.0)


@method("closure")
class InClosure(Packing):
    """Tensor and number in the cells of a closure, as dispatchers of GEMMs keep them."""

    def put(self, layer: Any, ints: torch.Tensor, alpha: float) -> None:
        def multiply(x: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
            return product(x, unpacked(ints, alpha), bias)

        layer.multiply = multiply

    def apply(self, layer: Any, x: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
        return layer.multiply(x, bias)


@method("partial")
class InPartial(InClosure):
    """The tensor bound by a partial; the number outside."""

    def put(self, layer: Any, ints: torch.Tensor, alpha: float) -> None:
        layer.alpha = alpha
        layer.multiply = functools.partial(_multiply, layer, ints)


@method("number_in_partial")
class NumberInPartial(InClosure):
    """Both bound by a partial, whose arguments can't be replaced."""

    def put(self, layer: Any, ints: torch.Tensor, alpha: float) -> None:
        layer.multiply = functools.partial(_product, ints=ints, alpha=alpha)


@method("bound_method")
class InBoundMethod(InClosure):
    def put(self, layer: Any, ints: torch.Tensor, alpha: float) -> None:
        layer.multiply = Holder(ints, alpha).multiply


@method("default_argument")
class InDefault(InClosure):
    """Both are default values of a function's arguments."""

    def put(self, layer: Any, ints: torch.Tensor, alpha: float) -> None:
        def multiply(x: Any, bias: Any, ints: Any = ints, *, alpha: float = alpha) -> torch.Tensor:
            return product(x, unpacked(ints, alpha), bias)

        layer.multiply = multiply


def _multiply(layer: Any, ints: Any, x: torch.Tensor, bias: Any) -> torch.Tensor:
    return product(x, unpacked(ints, layer.alpha), bias)


def _product(x: torch.Tensor, bias: Any, *, ints: Any, alpha: float) -> torch.Tensor:
    return product(x, unpacked(ints, alpha), bias)


@method("module_in_list")
class ModuleInList(Packing):
    """A module that the model does not register, with a child."""

    def put(self, layer: Any, ints: torch.Tensor, alpha: float) -> None:
        layer.kept = [Registered(ints, alpha)]

    def got(self, layer: Any) -> tuple[torch.Tensor, float]:
        inner = layer.kept[0].inner.weight.data
        return layer.kept[0].ints, layer.kept[0].alpha + float(inner.sum())


@method("child_module")
class ChildModule(Packing):
    """Processing adds a child module."""

    def put(self, layer: Any, ints: torch.Tensor, alpha: float) -> None:
        layer.runtime = Registered(ints, alpha)

    def got(self, layer: Any) -> tuple[torch.Tensor, float]:
        return layer.runtime.ints, layer.runtime.alpha


@method("numpy")
class InNumpy(Packing):
    def put(self, layer: Any, ints: torch.Tensor, alpha: float) -> None:
        layer.ints, layer.alpha = ints.numpy().copy(), np.array([alpha])

    def got(self, layer: Any) -> tuple[torch.Tensor, float]:
        return torch.from_numpy(layer.ints), float(layer.alpha[0])


@method("numpy_reversed")
class InNumpyReversed(InNumpy):
    """Torch has no negative strides."""

    def put(self, layer: Any, ints: torch.Tensor, alpha: float) -> None:
        layer.ints, layer.alpha = ints.numpy().copy()[::-1], np.array([alpha])

    def got(self, layer: Any) -> tuple[torch.Tensor, float]:
        return torch.from_numpy(layer.ints.copy()), float(layer.alpha[0])


@method("numpy_structured")
class InNumpyStructured(Packing):
    """Nor has it structured dtypes."""

    def put(self, layer: Any, ints: torch.Tensor, alpha: float) -> None:
        layer.alpha = alpha
        layer.kept = np.zeros(ints.shape, dtype=[("value", "i1"), ("rest", "i1")])
        layer.kept["value"] = ints.numpy()

    def got(self, layer: Any) -> tuple[torch.Tensor, float]:
        return torch.from_numpy(layer.kept["value"].copy()), layer.alpha


@method("numpy_read_only")
class InNumpyReadOnly(InNumpy):
    """The array reads immutable bytes."""

    def put(self, layer: Any, ints: torch.Tensor, alpha: float) -> None:
        raw = ints.numpy().tobytes()
        layer.ints = np.frombuffer(raw, dtype=np.int8).reshape(ints.shape)
        layer.alpha = np.array([alpha])

    got = InNumpyReversed.got


@method("numpy_scalar")
class InNumpyScalar(Packing):
    """A float32 scalar of numpy's, there before processing already."""

    def create_weights(self, layer: Any, *args: Any, **kwargs: Any) -> None:
        super().create_weights(layer, *args, **kwargs)
        layer.alpha = np.float32(1.0)

    def put(self, layer: Any, ints: torch.Tensor, alpha: float) -> None:
        layer.ints, layer.alpha = ints, np.float32(alpha)

    def got(self, layer: Any) -> tuple[torch.Tensor, float]:
        return layer.ints, float(layer.alpha)


@method("bytes")
class InBytes(Packing):
    def put(self, layer: Any, ints: torch.Tensor, alpha: float) -> None:
        layer.raw, layer.alpha = ints.numpy().tobytes(), alpha

    def got(self, layer: Any) -> tuple[torch.Tensor, float]:
        full = torch.frombuffer(bytearray(layer.raw), dtype=torch.int8)
        return full.view(layer.columns, -1), layer.alpha

    def create_weights(self, layer: Any, *args: Any, **kwargs: Any) -> None:
        super().create_weights(layer, *args, **kwargs)
        layer.columns = layer.weight.shape[1]


@method("normalized")
class Normalized(Plain):
    """Processing twice leaves the tensors of processing once, but another number."""

    def process(self, layer: Any) -> None:
        full = layer.weight.data.float()
        largest = 2.0 ** int(torch.log2(full.abs().max()).ceil())
        layer.weight.data.copy_(full / largest)  # exact: a power of two
        layer.alpha = largest

    def matrix(self, layer: Any) -> torch.Tensor:
        return whole(layer).t() * layer.alpha


@method("packed_tuple_of_tensors")
class Pairs(Packing):
    """Nested tuples of tensors, and a dict keyed by tuples."""

    def put(self, layer: Any, ints: torch.Tensor, alpha: float) -> None:
        half = len(ints) // 2
        layer.kept = (((ints[:half].clone(),), {("lower", 1): ints[half:].clone()}),)
        layer.alpha = alpha

    def got(self, layer: Any) -> tuple[torch.Tensor, float]:
        (((upper,), others),) = layer.kept
        return torch.cat([upper, others["lower", 1]]), layer.alpha


@method("long_chain")
class LongChain(Packing):
    """A linked list of a hundred links, the tensor in the last."""

    def put(self, layer: Any, ints: torch.Tensor, alpha: float) -> None:
        layer.chain = Holder(ints, alpha)
        for _ in range(100):
            layer.chain = Holder(layer.chain, 0.0)

    def got(self, layer: Any) -> tuple[torch.Tensor, float]:
        link = layer.chain
        while isinstance(link.ints, Holder):
            link = link.ints
        return link.ints, link.alpha


@method("quant_method_replaced")
class Replaced(Plain):
    """Processing installs another method for the layer."""

    def process(self, layer: Any) -> None:
        ints, alpha = packed(layer)
        forget(layer)
        layer.ints, layer.alpha = ints, alpha
        layer.quant_method = _Successor(self.config, self.prefix)


class _Successor(Plain):
    def matrix(self, layer: Any) -> torch.Tensor:
        return unpacked(layer.ints, layer.alpha)
