"""Methods of attention layers, whose kernel can't be run by itself: state has to be seen, or refused."""

import ctypes
import functools
import operator
import types
import weakref
from decimal import Decimal
from fractions import Fraction
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


class ById(Scaled):
    """In a registry of the process, keyed by the layer; nothing of it is left in the layer."""

    kept: dict[int, float] = {}  # noqa: RUF012

    def put(self, layer: Any, value: float) -> None:
        self.kept[id(layer)] = value

    def got(self, layer: Any) -> float:
        return self.kept[id(layer)]


class _Key:
    def __init__(self, number: int) -> None:
        self.number = number

    def __repr__(self) -> str:
        return "key"


class SameRepr(Scaled):
    """Under two keys that print alike."""

    def prepare(self, layer: Any) -> None:
        layer.keys = [_Key(0), _Key(1), _Key(2)]

    def put(self, layer: Any, value: float) -> None:
        layer.kept = {key: value * (key.number + 1) for key in layer.keys}

    def got(self, layer: Any) -> float:
        return sum(layer.kept[key] * 10**key.number for key in layer.keys)


class SamePath(Scaled):
    """An attribute whose name reads like the path to another."""

    def put(self, layer: Any, value: float) -> None:
        layer.kept = types.SimpleNamespace(value=value)
        vars(layer)["kept.value"] = value + 1

    def got(self, layer: Any) -> float:
        return layer.kept.value * 10 + vars(layer)["kept.value"]


class InCache(Scaled):
    """What a cached function returned while its closure still held something else."""

    def put(self, layer: Any, value: float) -> None:
        layer.give = functools.lru_cache(lambda: value)
        layer.give()

    def got(self, layer: Any) -> float:
        return layer.give()


class _Owned:
    def __init__(self, value: float) -> None:
        self.value = value


class ByWeakref(Scaled):
    """On an object that the layer only refers to weakly."""

    kept: list[Any] = []  # noqa: RUF012

    def put(self, layer: Any, value: float) -> None:
        self.kept.append(_Owned(value))
        layer.reference = weakref.ref(self.kept[-1])

    def got(self, layer: Any) -> float:
        return layer.reference().value


class OnNewClass(Scaled):
    """In an attribute of a class that processing makes."""

    def put(self, layer: Any, value: float) -> None:
        layer.made = type("Made", (), {"value": value})

    def got(self, layer: Any) -> float:
        return layer.made.value


class OnNewModule(Scaled):
    """In a module object, as code generators make them."""

    def put(self, layer: Any, value: float) -> None:
        layer.made = types.ModuleType("made")
        layer.made.value = value

    def got(self, layer: Any) -> float:
        return layer.made.value


class InGenerator(Scaled):
    """In the frame of a generator that stands still."""

    def put(self, layer: Any, value: float) -> None:
        def forever() -> Any:
            while True:
                yield value

        layer.source = forever()
        next(layer.source)

    def got(self, layer: Any) -> float:
        return next(layer.source)


class InMemoryview(Scaled):
    def put(self, layer: Any, value: float) -> None:
        layer.view = memoryview(bytearray(np.float64(value).tobytes()))

    def got(self, layer: Any) -> float:
        return float(np.frombuffer(layer.view)[0])


class InFraction(Scaled):
    def put(self, layer: Any, value: float) -> None:
        layer.value = Fraction(value)

    def got(self, layer: Any) -> float:
        return float(layer.value)


class InGlobals(Scaled):
    """In the globals of a function made for it."""

    def put(self, layer: Any, value: float) -> None:
        def give() -> float:
            return held  # type: ignore[name-defined]  # noqa: F821

        layer.give = types.FunctionType(give.__code__, {"held": value})

    def got(self, layer: Any) -> float:
        return layer.give()


class InCode(Scaled):
    """Compiled into a function, as code generators do with constants."""

    def put(self, layer: Any, value: float) -> None:
        layer.give = eval(f"lambda: {value!r}")

    def got(self, layer: Any) -> float:
        return layer.give()


class InItemgetter(Scaled):
    """In an object of the operator module, whose type is written in C."""

    def put(self, layer: Any, value: float) -> None:
        layer.pick = operator.itemgetter(int(value * 8))

    def got(self, layer: Any) -> float:
        return layer.pick(range(100)) / 8


def _plus() -> float:
    return 1.0


def _minus() -> float:
    return -1.0


_CLASSES = {
    "attention_number": Scaled,
    "attention_object": InObject,
    "attention_ctypes": InCtypes,
    "attention_numpy_scalar": InNumpyScalar,
    "attention_decimal": InDecimal,
    "attention_bytearray": InBytearray,
    "attention_tensor_attribute": InTensorAttribute,
    "attention_list_subclass": OnListSubclass,
    "attention_private_slot": InPrivateSlot,
    "attention_by_id": ById,
    "attention_same_repr": SameRepr,
    "attention_same_path": SamePath,
    "attention_cache": InCache,
    "attention_weakref": ByWeakref,
    "attention_new_class": OnNewClass,
    "attention_new_module": OnNewModule,
    "attention_generator": InGenerator,
    "attention_memoryview": InMemoryview,
    "attention_fraction": InFraction,
    "attention_globals": InGlobals,
    "attention_code": InCode,
    "attention_itemgetter": InItemgetter,
    "attention_function": ByFunction,
    "attention_class": ByClass,
    "attention_handle": Handle,
    "attention_handle_in_string": HandleInString,
}
for _name, _cls in _CLASSES.items():
    ATTENTION_METHODS[_name] = _cls
    METHODS[_name] = Plain


def reveal(model: nn.Module) -> None:
    """Show, as a plain float, what each attention method's kernel would read."""
    for module in model.modules():
        if isinstance(getattr(module, "quant_method", None), Scaled):
            module.revealed = module.quant_method.got(module)
