"""The way from a patch to the code of this package that does the work, imported when first called.

A patch that only hands a call over is probed by asking whether the call arrives here: a probe puts
a stand-in in the place of the function meant, so that it neither loads nor writes anything. What
the function itself does is tested where it is written.
"""

import importlib
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from contextvars import ContextVar
from types import MappingProxyType
from typing import Any

_NOTHING: Mapping[str, Callable[..., Any]] = MappingProxyType({})
_stand_ins: ContextVar[Mapping[str, Callable[..., Any]]] = ContextVar(
    "vss_stand_ins", default=_NOTHING
)


def inward(module: str, name: str) -> Callable[..., Any]:
    """Return function `name` of `vllm_sharded_state.<module>`, or the stand-in of a probe.

    Raises:
        ImportError, AttributeError: this package is damaged; nothing is put in its place.
    """
    stand_in = _stand_ins.get().get(f"{module}.{name}")
    if stand_in is not None:
        return stand_in
    function: Callable[..., Any] = getattr(
        importlib.import_module(f"vllm_sharded_state.{module}"), name
    )
    return function


@contextmanager
def stand_in(module: str, name: str, function: Callable[..., Any]) -> Iterator[None]:
    """Let `inward(module, name)` return `function` inside the block."""
    token = _stand_ins.set({**_stand_ins.get(), f"{module}.{name}": function})
    try:
        yield
    finally:
        _stand_ins.reset(token)
