"""Methods of attention layers, whose kernel can't be run by itself: state has to be seen, or refused."""

import ctypes
from decimal import Decimal
from typing import Any

import numpy as np
import torch
from torch import nn
from vllm.model_executor.layers.quantization.kv_cache import BaseKVCacheMethod

from tests.quantization.base import ATTENTION_METHODS, METHODS, MethodsConfig, Plain, frozen


class Scaled(BaseKVCacheMethod):
    """An attention method with a parameter of its own; keeps a float made of it."""

    def __init__(self, config: MethodsConfig, prefix: str) -> None:
        super().__init__(config)

    def create_weights(self, layer: Any) -> None:
        super().create_weights(layer)
        layer.register_parameter("temper", frozen(torch.zeros(3)))
        self.prepare(layer)

    def prepare(self, layer: Any) -> None:
        """Attributes that are there before processing."""

    def process_weights_after_loading(self, layer: Any) -> None:
        value = float(layer.temper.data.sum()) / 7
        super().process_weights_after_loading(layer)
        del layer.temper
        self.put(layer, value)

    def put(self, layer: Any, value: float) -> None:
        layer.value = value

    def got(self, layer: Any) -> float:
        return layer.value


class InObject(Scaled):
    def put(self, layer: Any, value: float) -> None:
        layer.kept = {"deep": [lambda: value]}

    def got(self, layer: Any) -> float:
        return layer.kept["deep"][0]()


class InCtypes(Scaled):
    def put(self, layer: Any, value: float) -> None:
        layer.value = ctypes.c_double(value)

    def got(self, layer: Any) -> float:
        return layer.value.value


class InNumpyScalar(Scaled):
    def prepare(self, layer: Any) -> None:
        layer.value = np.float32(1.0)

    def put(self, layer: Any, value: float) -> None:
        layer.value = np.float32(value)

    def got(self, layer: Any) -> float:
        return float(layer.value)


class InDecimal(InNumpyScalar):
    def prepare(self, layer: Any) -> None:
        layer.value = Decimal(1)

    def put(self, layer: Any, value: float) -> None:
        layer.value = Decimal(value)


class InBytearray(InNumpyScalar):
    def prepare(self, layer: Any) -> None:
        layer.value = bytearray(8)

    def put(self, layer: Any, value: float) -> None:
        layer.value[:] = np.float64(value).tobytes()

    def got(self, layer: Any) -> float:
        return float(np.frombuffer(bytes(layer.value))[0])


class InTensorAttribute(Scaled):
    """A number on a buffer of the layer."""

    def put(self, layer: Any, value: float) -> None:
        layer.register_buffer("held", torch.zeros(2))
        layer.held.value = value

    def got(self, layer: Any) -> float:
        return layer.held.value


class OnListSubclass(Scaled):
    class Numbers(list):
        value = 0.0

    def put(self, layer: Any, value: float) -> None:
        layer.kept = self.Numbers()
        layer.kept.value = value

    def got(self, layer: Any) -> float:
        return layer.kept.value


class _Private:
    __slots__ = ("__value",)

    def __init__(self, value: float) -> None:
        self.__value = value

    def tell(self) -> float:
        return self.__value


class InPrivateSlot(Scaled):
    """In a slot whose name Python changes."""

    def put(self, layer: Any, value: float) -> None:
        layer.kept = _Private(value)

    def got(self, layer: Any) -> float:
        return layer.kept.tell()


class ByFunction(Scaled):
    """The weights choose one of two functions."""

    def put(self, layer: Any, value: float) -> None:
        layer.value = _plus if value > 1 else _minus

    def got(self, layer: Any) -> float:
        return layer.value()


class ByClass(Scaled):
    """The weights choose a class."""

    def put(self, layer: Any, value: float) -> None:
        layer.value = float if value > 1 else int

    def got(self, layer: Any) -> float:
        return 1.0 if layer.value is float else -1.0


class Handle(Scaled):
    """A small index into a list of the process."""

    kept: list[float] = []  # noqa: RUF012

    def put(self, layer: Any, value: float) -> None:
        self.kept.append(value)
        layer.handle = len(self.kept)

    def got(self, layer: Any) -> float:
        return self.kept[layer.handle - 1]


class HandleInString(Handle):
    def put(self, layer: Any, value: float) -> None:
        self.kept.append(value)
        layer.handle = str(len(self.kept))

    def got(self, layer: Any) -> float:
        return self.kept[int(layer.handle) - 1]


def _plus() -> float:
    return 1.0


def _minus() -> float:
    return -1.0


def enter(classes: dict[str, type[Scaled]]) -> None:
    """Register methods of attention layers by name; the linear layers of their models are plain."""
    for name, cls in classes.items():
        ATTENTION_METHODS[name] = cls
        METHODS[name] = Plain


enter(
    {
        "attention_number": Scaled,
        "attention_object": InObject,
        "attention_ctypes": InCtypes,
        "attention_numpy_scalar": InNumpyScalar,
        "attention_decimal": InDecimal,
        "attention_bytearray": InBytearray,
        "attention_tensor_attribute": InTensorAttribute,
        "attention_list_subclass": OnListSubclass,
        "attention_private_slot": InPrivateSlot,
        "attention_function": ByFunction,
        "attention_class": ByClass,
        "attention_handle": Handle,
        "attention_handle_in_string": HandleInString,
    }
)


def reveal(model: nn.Module) -> None:
    """Show, as a plain float, what each attention method's kernel would read."""
    for module in model.modules():
        if isinstance(getattr(module, "quant_method", None), Scaled):
            module.revealed = module.quant_method.got(module)
