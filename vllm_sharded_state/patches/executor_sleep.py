"""Remember that `sleep(level=2)` threw the weights away.

What: `vllm.v1.executor.abstract.Executor.sleep`.

Why: nothing knows after `wake_up` that parameters hold anything. A reload that is sent a part of the
    model leaves the rest so, and one that fails can't give back what was there.

How: the workers are told (`reload.lost.tell`), whether or not the call ended well: upstream checks how
    much memory it freed after it has freed it.

Since: vLLM 0.32 (seen in 0.32 and 0.33).

Until: upstream keeps which of a model's tensors hold nothing.
"""

from contextlib import suppress
from typing import Any

from vllm_sharded_state.patches.contract import Function, Patch
from vllm_sharded_state.patches.inward import inward, stand_in


def make(original: Function) -> Function:
    """Return the method, and then tell the workers."""

    def sleep(self: Any, level: int = 1) -> None:
        awake = "weights" not in self.sleeping_tags
        try:
            original(self, level)
        finally:
            if level == 2 and awake:
                inward("reload.lost", "tell")(self)

    return sleep


class _Stop(Exception):
    """Ends upstream's function before it logs."""


class _Executor:
    """An executor without workers, of which nobody can note that it sleeps."""

    def collective_rpc(self, *_: Any, **__: Any) -> list[Any]:
        return []

    @property
    def sleeping_tags(self) -> set[str]:
        return set()

    @sleeping_tags.setter
    def sleeping_tags(self, _: set[str]) -> None:
        raise _Stop


def probe() -> bool:
    """Send an executor without workers to sleep; is nobody told?"""
    from vllm.v1.executor.abstract import Executor

    told: list[Any] = []
    executor: Any = _Executor()
    with stand_in("reload.lost", "tell", told.append), suppress(_Stop):
        Executor.sleep(executor, 2)
    return told != [executor]


PATCH = Patch(
    name="executor_sleep",
    module="vllm.v1.executor.abstract",
    symbol="Executor.sleep",
    probe=probe,
    make=make,
)
