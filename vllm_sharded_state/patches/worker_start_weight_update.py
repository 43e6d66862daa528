"""Let a worker start an update when an earlier one was never finished.

What: `vllm.v1.worker.gpu_worker.Worker._start_weight_update`

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

    def _start_weight_update(self: Any, is_draft: bool = False) -> None:
        inward("reload.worker", "starting")(self)
        original(self, is_draft)

    return _start_weight_update


def probe() -> bool:
    """Start an update of a worker that is none; is the call not announced?"""
    from vllm.v1.worker.gpu_worker import Worker

    worker: Any = SimpleNamespace()
    seen: list[object] = []
    with stand_in("reload.worker", "starting", seen.append):
        try:
            Worker._start_weight_update(worker)
        except AttributeError:  # it lacks all that the original asks for
            return seen != [worker]
    return True


PATCH = Patch(
    name="worker_start_weight_update",
    module="vllm.v1.worker.gpu_worker",
    symbol="Worker._start_weight_update",
    probe=probe,
    make=make,
)
