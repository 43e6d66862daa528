"""Let a call of the executor that failed on one worker leave no replies for the next one.

What: `vllm.v1.executor.multiproc_executor.MultiprocExecutor.collective_rpc`

Why: it stops at the first worker that failed. What the others reply stays in their queues, and is taken
    for the reply to the next call: after an update that failed on two ranks, the next start raises the
    old error.

How: the original reads from `reload.replies.Replies`, which drops what was left of earlier calls.

Since: vLLM 0.32 (seen in 0.32).

Until: upstream reads every reply, or knows to which call it belongs.
"""

from collections import deque
from contextlib import suppress
from types import SimpleNamespace
from typing import Any

from vllm_sharded_state.patches.contract import Function, Patch
from vllm_sharded_state.patches.inward import inward


def make(original: Function) -> Function:
    """Return the method with replies that belong to the call."""

    def collective_rpc(self: Any, *args: Any, **kwargs: Any) -> Any:
        queues = self.response_mqs
        self.response_mqs = replies = inward("reload.replies", "Replies")(queues)
        try:
            return original(self, *args, **kwargs)
        finally:
            if self.response_mqs is replies:  # and not shut down meanwhile
                self.response_mqs = queues

    return collective_rpc


class _Queue:
    """A worker's replies, given beforehand."""

    def __init__(self, *replies: Any) -> None:
        self._replies = deque(replies)

    def dequeue(self, timeout: float | None = None) -> Any:
        return self._replies.popleft()


def probe() -> bool:
    """Call two workers that fail, and again when they don't; does the second call fail?"""
    from vllm.v1.executor.multiproc_executor import MultiprocExecutor, WorkerProc

    status = WorkerProc.ResponseStatus
    replies = ((status.FAILURE, "first"), (status.SUCCESS, "second"))
    executor: Any = SimpleNamespace(
        rpc_broadcast_mq=SimpleNamespace(enqueue=lambda call: None),
        response_mqs=[_Queue(*replies), _Queue(*replies)],
        futures_queue=deque(),
        is_failed=False,
    )
    with suppress(RuntimeError):
        MultiprocExecutor.collective_rpc(executor, "method")
    try:
        return bool(MultiprocExecutor.collective_rpc(executor, "method") != ["second"] * 2)
    except RuntimeError:
        return True


PATCH = Patch(
    name="multiproc_collective_rpc",
    module="vllm.v1.executor.multiproc_executor",
    symbol="MultiprocExecutor.collective_rpc",
    probe=probe,
    make=make,
)
