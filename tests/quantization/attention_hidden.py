"""Methods of attention layers that keep a number where a walk over objects hardly gets."""

import functools
import operator
import types
import weakref
from fractions import Fraction
from typing import Any

import numpy as np

from tests.quantization.attention import Scaled, enter


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


enter(
    {
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
    }
)
