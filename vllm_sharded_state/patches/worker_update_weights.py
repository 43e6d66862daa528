"""Let an update end when one of its calls fails, on every rank.

What: `vllm.v1.worker.worker_base.WorkerWrapperBase.update_weights`, which upstream hands on to the
    worker.

Why: where a call fails before a tensor is loaded (a broken connection, say), or on one rank alone, the
    other ranks keep what they have loaded, and serve new weights beside old ones.

How: `reload.worker.step` takes everything back when the call fails, and lets it succeed only when it did
    on every rank.

Since: vLLM 0.32 (seen in 0.32).

Until: upstream takes back an update that failed.
"""

from contextlib import nullcontext
from types import SimpleNamespace
from typing import Any

from vllm_sharded_state.patches.contract import Function, Patch
from vllm_sharded_state.patches.inward import inward, stand_in


def make(original: Function) -> Function:
    """Return the method as one step of an update."""

    def update_weights(self: Any, update_info: Any) -> None:
        with inward("reload.worker", "step")(self.worker, agree=True):
            original(self, update_info)

    return update_weights


def probe() -> bool:
    """Send something to a toy; is the call no step?"""
    from vllm.v1.worker.worker_base import WorkerWrapperBase

    wrapper = WorkerWrapperBase.__new__(WorkerWrapperBase)
    wrapper.worker = SimpleNamespace(update_weights=lambda *_: None)
    steps: list[object] = []

    def step(worker: object, agree: bool) -> nullcontext[None]:
        steps.append((worker, agree))
        return nullcontext()

    with stand_in("reload.worker", "step", step):
        wrapper.update_weights({})
    return steps != [(wrapper.worker, True)]


PATCH = Patch(
    name="worker_update_weights",
    module="vllm.v1.worker.worker_base",
    symbol="WorkerWrapperBase.update_weights",
    probe=probe,
    make=make,
    handed_on=True,
)
