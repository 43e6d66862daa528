"""Every tensor and every Python value that a module reaches, each with a path and a way to replace it.

The walk goes where kernels can: parameters, buffers, plain attributes, dicts, lists, tuples, sets,
dataclasses and any other Python object, closure cells, default arguments, `functools.partial` and
bound methods. It does not enter other modules of the model (each is walked for itself), nor what
`boundaries` names. Attributes are visited in sorted order, so that equal structures give equal paths.
"""

import copy
import functools
import types
import weakref
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from enum import StrEnum
from typing import Any

import numpy as np
import torch
from torch import nn

from . import boundaries, plain

#: A structure nested deeper than this is reported as opaque rather than followed.
MAX_DEPTH = 64
#: Values that are one leaf, and that somebody may change later.
_CHANGE_IN_PLACE = (set, bytearray)


class Kind(StrEnum):
    """What a leaf is to its module."""

    PARAMETER = "parameter"
    BUFFER = "buffer"  # persistent: in `state_dict()`
    TRANSIENT = "transient"  # a buffer that `state_dict()` leaves out
    ATTRIBUTE = "attribute"  # a tensor anywhere else: hidden state
    VALUE = "value"  # a Python number, string or set
    OPAQUE = "opaque"  # owned by native code: it can be neither read nor replaced


@dataclass(frozen=True)
class Leaf:
    """One tensor or value of a module.

    `assign` replaces it where it lies, and is None where nothing can (a tuple, an argument of a
    partial); a tensor can always be filled in place instead. `owner` is the module the walk came from.
    """

    path: str
    kind: Kind
    value: Any
    assign: Callable[[Any], None] | None
    owner: str

    @property
    def is_tensor(self) -> bool:
        """Whether `value` is a tensor."""
        return isinstance(self.value, torch.Tensor)

    @property
    def attribute(self) -> str | None:
        """The name of the owner's attribute that this leaf is, or None when it lies deeper."""
        name = self.path.removeprefix(self.owner).removeprefix(".")
        return name if name.isidentifier() else None

    @property
    def in_state_dict(self) -> bool:
        """Whether upstream's `state_dict()` shows it, under this very path."""
        return self.kind in (Kind.PARAMETER, Kind.BUFFER)


def walk(modules: Mapping[str, nn.Module], inside: set[int]) -> Iterator[Leaf]:
    """Yield the leaves of `modules` (path to module), not following modules whose id is in `inside`."""
    visitor = _Visitor(inside)
    for name, module in modules.items():
        visitor.owner = name
        yield from visitor.module(name, module)


def join(owner: str, attribute: str) -> str:
    """The path of an attribute; the root module's own name is empty."""
    return f"{owner}.{attribute}" if owner else attribute


class _Visitor:
    def __init__(self, inside: set[int]) -> None:
        self.owner = ""
        self._inside = inside
        self._seen: set[int] = set()

    def module(self, path: str, module: nn.Module) -> Iterator[Leaf]:
        """The leaves of one module: first what `state_dict()` shows, then the rest."""
        self._seen.add(id(module))
        yield self._named(f"{path}.<class>", type(module))
        for name, parameter in sorted(module._parameters.items()):
            yield from self._registered(module, path, name, parameter, Kind.PARAMETER)
        for name, buffer in sorted(module._buffers.items()):
            transient = name in module._non_persistent_buffers_set
            kind = Kind.TRANSIENT if transient else Kind.BUFFER
            yield from self._registered(module, path, name, buffer, kind)
        skipped = boundaries.skipped_attributes(module)
        for name, value in sorted(vars(module).items()):
            if name not in skipped:
                yield from self._visit(join(path, name), value, _attribute(module, name), 0)

    def _registered(
        self, module: nn.Module, path: str, name: str, tensor: torch.Tensor | None, kind: Kind
    ) -> Iterator[Leaf]:
        path, assign = join(path, name), _attribute(module, name)
        if tensor is None:
            yield self._leaf(path, Kind.VALUE, None, assign)
        else:
            yield from self._tensor(path, kind, tensor, assign, 0)

    def _tensor(
        self,
        path: str,
        kind: Kind,
        tensor: torch.Tensor,
        assign: Callable[[Any], None] | None,
        depth: int,
    ) -> Iterator[Leaf]:
        if tensor.layout != torch.strided or tensor.is_quantized:
            yield self._leaf(path, Kind.OPAQUE, tensor, assign)
            return
        yield self._leaf(path, kind, tensor, assign)
        if id(tensor) not in self._seen:
            self._seen.add(id(tensor))
            yield self._named(f"{path}.<class>", type(tensor))
            yield from self._object_state(path, tensor, depth)

    def _named(self, path: str, thing: Any) -> Leaf:
        """A leaf for the choice of a class or function: nothing can replace it, it can only differ."""
        module = getattr(thing, "__module__", None)
        name = getattr(thing, "__qualname__", None) or str(thing)
        return self._leaf(path, Kind.VALUE, f"{module}.{name}", None)

    def _leaf(
        self, path: str, kind: Kind, value: Any, assign: Callable[[Any], None] | None
    ) -> Leaf:
        return Leaf(path, kind, value, assign, self.owner)

    def _visit(
        self, path: str, value: Any, assign: Callable[[Any], None] | None, depth: int
    ) -> Iterator[Leaf]:
        if isinstance(value, torch.Tensor):
            yield from self._tensor(path, Kind.ATTRIBUTE, value, assign, depth)
            return
        if isinstance(value, np.ndarray):
            shared = _as_tensor(value)  # shares memory: filling the tensor fills the array
            kind = Kind.OPAQUE if shared is None else Kind.ATTRIBUTE
            yield self._leaf(path, kind, value if shared is None else shared, None)
            return
        if plain.is_plain(value):
            held = copy.copy(value) if isinstance(value, _CHANGE_IN_PLACE) else value
            yield self._leaf(path, Kind.VALUE, held, assign)
            return
        if isinstance(value, boundaries.CHOICES):
            yield self._named(path, value)
            return
        if id(value) in self._seen or id(value) in self._inside:
            return
        if boundaries.leads_outside(value):
            return
        self._seen.add(id(value))
        if depth >= MAX_DEPTH:
            yield self._leaf(path, Kind.OPAQUE, value, assign)
            return
        yield from self._descend(path, value, depth + 1, assign)

    def _descend(
        self, path: str, value: Any, depth: int, assign: Callable[[Any], None] | None
    ) -> Iterator[Leaf]:
        if isinstance(value, types.FunctionType):
            yield from self._function(path, value, depth)
            return
        if isinstance(value, weakref.ref):
            yield from self._visit(f"{path}()", value(), None, depth)
            return
        if isinstance(value, types.MethodType):
            yield from self._visit(f"{path}.__self__", value.__self__, None, depth)
            yield from self._visit(f"{path}.__func__", value.__func__, None, depth)
            return
        if isinstance(value, nn.Module):  # held by an object, not registered with the model
            yield from self.module(path, value)
            for name, child in sorted(value._modules.items()):
                yield from self._visit(join(path, name), child, None, depth)
            return
        if boundaries.is_native_handle(value):
            yield self._leaf(path, Kind.OPAQUE, value, assign)
            return
        yield self._named(f"{path}.<class>", type(value))
        if isinstance(value, Mapping):
            for key in sorted(value, key=repr):
                setter = _item(value, key) if isinstance(value, dict) else None
                yield from self._visit(f"{path}[{key!r}]", value[key], setter, depth)
        elif isinstance(value, list | deque):
            for index, item in enumerate(value):
                yield from self._visit(f"{path}[{index}]", item, _item(value, index), depth)
        elif isinstance(value, tuple):
            for index, item in enumerate(value):
                yield from self._visit(f"{path}[{index}]", item, None, depth)
        elif isinstance(value, set | frozenset):
            for index, item in enumerate(sorted(value, key=repr)):
                yield from self._visit(f"{path}{{{index}}}", item, None, depth)
        elif isinstance(value, functools.partial):
            yield from self._visit(f"{path}.func", value.func, None, depth)
            yield from self._visit(f"{path}.args", value.args, None, depth)
            yield from self._visit(f"{path}.keywords", value.keywords, None, depth)
        yield from self._object_state(path, value, depth)

    def _function(self, path: str, function: types.FunctionType, depth: int) -> Iterator[Leaf]:
        compiled = getattr(function, "_torchdynamo_orig_callable", None)
        if compiled is not None:  # a wrapper of torch.compile's: the state is the function's own
            yield from self._visit(path, compiled, None, depth)
            return
        if (function.__module__ or "").startswith("torch."):
            return
        yield self._named(f"{path}.<function>", function)
        names = function.__code__.co_freevars
        for name, cell in zip(names, function.__closure__ or (), strict=True):
            try:
                content = cell.cell_contents
            except ValueError:  # a cell that has not been filled yet
                continue
            yield from self._visit(f"{path}.<{name}>", content, _cell(cell), depth)
        for index, default in enumerate(function.__defaults__ or ()):
            yield from self._visit(f"{path}.<default {index}>", default, None, depth)
        for name, default in sorted((function.__kwdefaults__ or {}).items()):
            yield from self._visit(f"{path}.<default {name}>", default, None, depth)
        yield from self._object_state(path, function, depth)

    def _object_state(self, path: str, value: Any, depth: int) -> Iterator[Leaf]:
        """Instance attributes, whether in `__dict__` or in slots."""
        state = dict(getattr(value, "__dict__", {}))
        for name, member in _slots(type(value)):
            try:
                state[name] = member.__get__(value)
            except AttributeError:  # a slot that was never set
                continue
        for name, item in sorted(state.items()):
            if not boundaries.is_aside(value, name):
                yield from self._visit(f"{path}.{name}", item, _attribute(value, name), depth)


#: What `_slots` found. A tensor's class has 800 members, and a model may have 50,000 tensors.
_SLOTS: "weakref.WeakKeyDictionary[type, tuple[tuple[str, Any], ...]]" = weakref.WeakKeyDictionary()


def _slots(cls: type) -> tuple[tuple[str, Any], ...]:
    """The slots that a class and those it inherits from declare, by name."""
    found = _SLOTS.get(cls)
    if found is None:
        found = _SLOTS[cls] = tuple(
            (name, member)
            for owner in cls.__mro__
            if boundaries.is_own(owner)
            for name, member in vars(owner).items()
            if isinstance(member, types.MemberDescriptorType)
        )
    return found


def _as_tensor(array: np.ndarray) -> torch.Tensor | None:
    """A tensor over the memory of `array`; None where torch can't share it."""
    if not array.flags.writeable or any(stride < 0 for stride in array.strides):
        return None
    try:
        return torch.from_numpy(array)
    except (TypeError, ValueError):
        return None


def _attribute(owner: Any, name: str) -> Callable[[Any], None]:
    def assign(value: Any) -> None:
        if isinstance(owner, nn.Module):
            setattr(owner, name, value)
        else:  # frozen dataclasses refuse setattr, but their state must come back too
            object.__setattr__(owner, name, value)

    return assign


def _item(container: Any, key: Any) -> Callable[[Any], None]:
    def assign(value: Any) -> None:
        container[key] = value

    return assign


def _cell(cell: types.CellType) -> Callable[[Any], None]:
    def assign(value: Any) -> None:
        cell.cell_contents = value

    return assign
