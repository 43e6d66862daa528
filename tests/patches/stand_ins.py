"""Stand-ins for the functions of this package that patches call."""

import sys
import types
from typing import Any

import pytest


class Called(list):
    """Stands for a function of this package: notes its arguments, returns `answer`."""

    answer: Any = None

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        self.append((args, kwargs))
        return self.answer


def stand_for(monkeypatch: pytest.MonkeyPatch, module: str, function: str) -> Called:
    """Put a `Called` where a patch would import the function from, whether or not it is there."""
    called = Called()
    stand_in = types.ModuleType(f"vllm_sharded_state.{module}")
    setattr(stand_in, function, called)
    monkeypatch.setitem(sys.modules, stand_in.__name__, stand_in)
    return called
