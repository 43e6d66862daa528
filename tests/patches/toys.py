"""Stand-ins for upstream and for somebody else's code, and a patch to change the one."""

import sys
import types
from collections.abc import Callable

import pytest

from vllm_sharded_state.patches.contract import Patch

UPSTREAM = """
def double(number):
    "Upstream's words."
    return number + 1  # the fault

class Base:
    def inherited(self):
        return "base"

class Thing(Base):
    def __new__(cls):
        thing = super().__new__(cls)
        thing.made_by = "upstream"
        return thing

    def method(self):
        return "upstream"

    @staticmethod
    def static(number):
        return number

    @classmethod
    def name(cls):
        return cls.__name__
"""

FOREIGN = """
import functools

def wrap(function):
    @functools.wraps(function)
    def wrapper(*args, **kwargs):
        return function(*args, **kwargs)
    return wrapper

def double(number):
    return 0
"""


def make_module(monkeypatch: pytest.MonkeyPatch, name: str, source: str) -> types.ModuleType:
    module = types.ModuleType(name)
    exec(source, module.__dict__)
    monkeypatch.setitem(sys.modules, name, module)
    return module


def make_double(original: Callable[[int], int]) -> Callable[[int], int]:
    def replacement(number: int) -> int:
        return 2 * number

    return replacement


def faulty() -> bool:
    return sys.modules["upstreamlib"].double(5) != 10


def a_patch(**changes: object) -> Patch:
    values: dict = {
        "name": "toy",
        "module": "upstreamlib",
        "symbol": "double",
        "probe": faulty,
        "make": make_double,
    }
    return Patch(**(values | changes))
