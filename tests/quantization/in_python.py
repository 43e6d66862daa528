"""Methods that keep what they made of the weights in Python objects around the module."""

import functools
from collections import OrderedDict, deque
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import nn

from tests.quantization.base import (
    Packing,
    frozen,
    method,
    product,
    unpacked,
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
