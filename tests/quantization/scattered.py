"""Methods drawn at random: state at a random depth, in random containers, under random names."""

import functools
import random
import types
from collections.abc import Callable
from dataclasses import dataclass, make_dataclass
from typing import Any

import torch

from tests.quantization.base import METHODS, Packing, unpacked

#: Puts a thing inside a new container; returns that, and how to get the thing back out of it.
Wrapper = Callable[[random.Random, Any], tuple[Any, Callable[[Any], Any]]]


def _word(draw: random.Random) -> str:
    return "".join(draw.choices("abcdefghijklmnopqrstuvwxyz_", k=draw.randint(3, 9))) + "x"


def _dict(draw: random.Random, thing: Any) -> tuple[Any, Callable[[Any], Any]]:
    key = draw.choice(
        [_word(draw), draw.randint(0, 99), (_word(draw), 1), f"{_word(draw)}.a b", "ü\n'\"/"]
    )
    return {_word(draw): 1, key: thing}, lambda box: box[key]


def _list(draw: random.Random, thing: Any) -> tuple[Any, Callable[[Any], Any]]:
    box: list[Any] = [None, draw.random(), "z"]
    index = draw.randint(0, 3)
    box.insert(index, thing)
    return box, lambda box: box[index]


def _tuple(draw: random.Random, thing: Any) -> tuple[Any, Callable[[Any], Any]]:
    box, take = _list(draw, thing)
    return tuple(box), take


def _object(draw: random.Random, thing: Any) -> tuple[Any, Callable[[Any], Any]]:
    name = _word(draw)
    return types.SimpleNamespace(**{name: thing}), lambda box: getattr(box, name)


def _record(draw: random.Random, thing: Any) -> tuple[Any, Callable[[Any], Any]]:
    name = _word(draw)
    frozen, slots = draw.random() < 0.5, draw.random() < 0.5
    cls = make_dataclass("Drawn", [(name, Any)], frozen=frozen, slots=slots)
    return cls(thing), lambda box: getattr(box, name)


def _closure(draw: random.Random, thing: Any) -> tuple[Any, Callable[[Any], Any]]:
    return (lambda: thing), lambda box: box()


def _partial(draw: random.Random, thing: Any) -> tuple[Any, Callable[[Any], Any]]:
    if draw.random() < 0.5:
        return functools.partial(_same, thing), lambda box: box()
    return functools.partial(_same, thing=thing), lambda box: box()


def _bound(draw: random.Random, thing: Any) -> tuple[Any, Callable[[Any], Any]]:
    return _Keeper(thing).give, lambda box: box()


def _module(draw: random.Random, thing: Any) -> tuple[Any, Callable[[Any], Any]]:
    name = _word(draw)
    module = torch.nn.Module()
    setattr(module, name, thing)
    return module, lambda box: getattr(box, name)


def _default(draw: random.Random, thing: Any) -> tuple[Any, Callable[[Any], Any]]:
    def give(thing: Any = thing) -> Any:
        return thing

    return give, lambda box: box()


def _same(thing: Any) -> Any:
    return thing


@dataclass
class _Keeper:
    thing: Any

    def give(self) -> Any:
        return self.thing


WRAPPERS: list[Wrapper] = [
    _dict,
    _list,
    _tuple,
    _object,
    _record,
    _closure,
    _partial,
    _bound,
    _module,
    _default,
]


def scatter(draw: random.Random, thing: Any) -> tuple[str, Any, Callable[[Any], Any]]:
    """Wrap `thing` one to six times: the attribute's name, the outermost box, the way back in."""
    ways: list[Callable[[Any], Any]] = []
    for _ in range(draw.randint(1, 6)):
        # A module as an attribute of the layer would be its child; inside of something it is not.
        thing, way = draw.choice(WRAPPERS)(draw, thing)
        ways.append(way)
    if isinstance(thing, torch.nn.Module):
        thing, way = _list(draw, thing)
        ways.append(way)

    def take(box: Any) -> Any:
        for way in reversed(ways):
            box = way(box)
        return box

    return _word(draw), thing, take


class Scattered(Packing):
    """The same draws for every layer of a model, and for every process: they follow from the seed."""

    def put(self, layer: Any, ints: torch.Tensor, alpha: float) -> None:
        draw = random.Random(self.config.seed)
        tensor = draw.choice(["parameter", "scattered", "scattered"])
        number = draw.choice(["scattered", "scattered", "attribute", "tensor"])
        self.ways: list[Callable[[Any], Any]] = []
        self._keep(layer, draw, ints, tensor)
        self._keep(layer, draw, torch.tensor(alpha) if number == "tensor" else alpha, number)

    def _keep(self, layer: Any, draw: random.Random, thing: Any, how: str) -> None:
        if how in ("scattered", "tensor"):
            name, box, take = scatter(draw, thing)
        else:
            name, take = _word(draw), _same
            box = torch.nn.Parameter(thing, requires_grad=False) if how == "parameter" else thing
        setattr(layer, name, box)
        self.ways.append(lambda layer: take(getattr(layer, name)))

    def got(self, layer: Any) -> tuple[torch.Tensor, float]:
        ints, alpha = (way(layer) for way in self.ways)
        return ints.data, alpha

    def matrix(self, layer: Any) -> torch.Tensor:
        ints, alpha = self.got(layer)
        return unpacked(ints, float(alpha))


METHODS["scattered"] = Scattered
