"""Methods in which the weights decide what there is: words, kernels, classes, attributes."""

import enum
from typing import Any

import torch

from tests.quantization.base import Plain, forget, method, packed, unpacked, whole
from tests.quantization.in_python import Holder


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
