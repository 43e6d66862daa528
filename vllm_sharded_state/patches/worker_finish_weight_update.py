"""Let an update be finished on every rank, or on none, and leave the worker ready for the next.

What: `vllm.v1.worker.worker_base.WorkerWrapperBase.finish_weight_update`, which upstream hands on to
    the worker.

Why: where finishing fails, upstream's worker takes the update for one that is still open, and refuses the
    next start. And after a call that failed, it says that there was no start.

How: `reload.worker.step` takes everything back and ends the update when finishing fails; when the update
    had failed before, it says so.

Since: vLLM 0.32 (seen in 0.32).

Until: upstream takes back an update that failed.
"""

from contextlib import nullcontext
from types import SimpleNamespace
from typing import Any

from vllm_sharded_state.patches.contract import Function, Patch
from vllm_sharded_state.patches.inward import inward, stand_in


def make(original: Function) -> Function:
    """Return the method as the last step of an update."""

    def finish_weight_update(self: Any) -> None:
        with inward("reload.worker", "step")(self.worker, agree=False):
            original(self)

    return finish_weight_update


def probe() -> bool:
    """Finish an update of a toy; is the call no step?"""
    from vllm.v1.worker.worker_base import WorkerWrapperBase

    wrapper = WorkerWrapperBase.__new__(WorkerWrapperBase)
    wrapper.worker = SimpleNamespace(finish_weight_update=lambda *_: None)
    steps: list[object] = []

    def step(worker: object, agree: bool) -> nullcontext[None]:
        steps.append((worker, agree))
        return nullcontext()

    with stand_in("reload.worker", "step", step):
        wrapper.finish_weight_update()
    return steps != [(wrapper.worker, False)]


PATCH = Patch(
    name="worker_finish_weight_update",
    module="vllm.v1.worker.worker_base",
    symbol="WorkerWrapperBase.finish_weight_update",
    probe=probe,
    make=make,
    handed_on=True,
)
