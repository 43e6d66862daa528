"""What a unit's quantization method has chosen: kernels, backends, switches.

Nothing is known about any method. Read are the objects that upstream hangs on a module to process its
weights, and below them the names of classes, members of enumerations, booleans, and strings whose names
say that they are choices. Numbers are left to the configuration, and tensors to the tensors.
"""

import enum
import re
from collections.abc import Iterator
from types import FunctionType, MethodType
from typing import Any

import torch
from torch import nn

from .units import Unit
from .walk import join

Choices = dict[str, bool | str | None]

#: Attributes of a module under which upstream keeps what processes or runs its weights.
_ROOTS = ("quant_method", "scheme", "impl", "attn_backend", "backend")
#: Objects of a root's own, to this depth: method, scheme, kernel, what the kernel wraps.
_DEPTH = 3
#: Strings under other names are not choices (a layer's prefix, say).
_STRINGS = re.compile("backend|kernel|dtype|strategy|format|mode|type|layout|scheme|policy|variant")
#: Configurations are compared in full elsewhere.
_CONFIGS = re.compile("config")
#: Types of values, not of what does something with them.
_VALUES = re.compile(r"(builtins|torch|numpy|collections|functools|types|typing|weakref)(\.|$)")


def choices(unit: Unit) -> Choices:
    """What is chosen in each module of `unit`, by path below it: `quant_method.kernel`, for example."""
    found: Choices = {}
    for name, module in unit.modules.items():
        below = name.removeprefix(unit.name).removeprefix(".")
        for attribute in _ROOTS:
            value = getattr(module, attribute, None)
            if value is not None:
                found.update(_choices(join(below, attribute), value, 0, set()))
    return found


def changed(before: Choices, after: Choices) -> Choices:
    """What of `after` is not as in `before`; None for what it lacks."""
    gone = dict.fromkeys(before.keys() - after.keys())
    return gone | {path: value for path, value in after.items() if before.get(path) != value}


def together(before: Choices, change: Choices) -> Choices:
    """`after`, of which `changed` made `change`."""
    return {path: value for path, value in {**before, **change}.items() if value is not None}


def different(saved: Choices, here: Choices) -> list[str]:
    """What was saved and is something else here, in words; what only one of them has counts as well."""
    return [
        f"{path}: saved {_said(saved, path)}, here {_said(here, path)}"
        for path in sorted(saved.keys() | here.keys())
        if _said(saved, path) != _said(here, path)
    ]


def _said(found: Choices, path: str) -> str:
    return repr(found[path]) if path in found else "nothing"


def _choices(path: str, value: object, depth: int, seen: set[int]) -> Iterator[tuple[str, Any]]:
    if isinstance(value, bool):
        yield path, value
    elif isinstance(value, enum.Enum):
        yield path, f"{type(value).__qualname__}.{value.name}"
    elif isinstance(value, type):
        yield path, _name(value)
    elif isinstance(value, str):
        if _STRINGS.search(path.rpartition(".")[2]):
            yield path, str(value)
    elif _does_something(value) and id(value) not in seen:
        yield path, _name(type(value))
        if depth < _DEPTH and _is_near(value, depth):
            for name, item in sorted(vars(value).items()):
                if not name.startswith("_") and not _CONFIGS.search(name):
                    yield from _choices(f"{path}.{name}", item, depth + 1, seen | {id(value)})


def _does_something(value: object) -> bool:
    if value is None or isinstance(value, FunctionType | MethodType | torch.Tensor):
        return False
    return hasattr(value, "__dict__") and not _VALUES.match(type(value).__module__)


def _is_near(value: object, depth: int) -> bool:
    """Whether to look into `value`: a root, or a part of vLLM's own, but no layer of the model."""
    if isinstance(value, nn.Module):
        return False
    return depth == 0 or type(value).__module__.startswith("vllm.model_executor.")


def _name(kind: type) -> str:
    return f"{kind.__module__}.{kind.__qualname__}"
