"""Let a worker start an update when an earlier one was never finished.

What: `vllm.v1.worker.worker_base.WorkerWrapperBase.start_weight_update`, which upstream hands on to
    the worker.

Why: a trainer that died in the middle of an update leaves the worker waiting for its end; a new trainer's
    start is refused, and finishing the old update would keep the half of it that has come.

How: first `reload.worker.starting` takes back what came of an update that is a transaction.

Since: vLLM 0.32 (seen in 0.32).

Until: upstream can abandon an update.
"""

from types import SimpleNamespace
from typing import Any

from vllm_sharded_state.patches.contract import Function, Patch
from vllm_sharded_state.patches.inward import inward, stand_in


def make(original: Function) -> Function:
    """Return the method with the earlier update given up before it."""

    def start_weight_update(self: Any) -> None:
        inward("reload.worker", "starting")(self.worker)
        original(self)

    return start_weight_update


def probe() -> bool:
    """Start an update of a toy; is the call not announced?"""
    from vllm.v1.worker.worker_base import WorkerWrapperBase

    wrapper = WorkerWrapperBase.__new__(WorkerWrapperBase)
    wrapper.worker = SimpleNamespace(start_weight_update=lambda: None)
    seen: list[object] = []
    with stand_in("reload.worker", "starting", seen.append):
        wrapper.start_weight_update()
    return seen != [wrapper.worker]


PATCH = Patch(
    name="worker_start_weight_update",
    module="vllm.v1.worker.worker_base",
    symbol="WorkerWrapperBase.start_weight_update",
    probe=probe,
    make=make,
    handed_on=True,
)
