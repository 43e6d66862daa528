"""The executor's replies: each call gets its own, whatever became of the calls before."""

from collections import deque
from types import SimpleNamespace

import pytest
from vllm.v1.executor.multiproc_executor import MultiprocExecutor, WorkerProc

from vllm_sharded_state.patches import multiproc_collective_rpc

OK, FAILED = WorkerProc.ResponseStatus.SUCCESS, WorkerProc.ResponseStatus.FAILURE


class Worker:
    """Replies to each call as `fails` says, to calls for all and to those for its rank."""

    def __init__(self, rank, fails=()):
        self.rank, self.fails = rank, fails
        self.replies = deque()

    def take(self, method, reply_rank):
        if reply_rank in (None, self.rank):
            self.replies.append((FAILED if method in self.fails else OK, f"{method} {self.rank}"))

    def dequeue(self, timeout=None):
        if not self.replies:
            raise TimeoutError
        return self.replies.popleft()


@pytest.fixture
def call():
    """Call a method on three workers, of which some fail."""
    multiproc_collective_rpc.PATCH.apply()
    workers = [Worker(0, {"a"}), Worker(1, {"b"}), Worker(2, {"a", "c"})]

    def enqueue(sent):
        method, _, _, reply_rank = sent
        for worker in workers:
            worker.take(method, reply_rank)

    executor = SimpleNamespace(
        rpc_broadcast_mq=SimpleNamespace(enqueue=enqueue),
        response_mqs=workers,
        futures_queue=deque(),
        is_failed=False,
    )
    yield lambda method, **more: MultiprocExecutor.collective_rpc(executor, method, **more)
    assert executor.response_mqs is workers
    multiproc_collective_rpc.PATCH.undo()


def test_replies_to_a_call_that_failed_are_not_taken_for_the_next(call):
    for method, rank in (("a", 0), ("b", 1), ("c", 2), ("b", 1), ("a", 0)):
        with pytest.raises(RuntimeError, match=f"{method} {rank}"):
            call(method)
        assert call("good") == ["good 0", "good 1", "good 2"]


def test_after_a_failure_a_single_rank_replies_for_itself(call):
    with pytest.raises(RuntimeError, match="a 0"):
        call("a")
    assert call("good", unique_reply_rank=1) == "good 1"
    with pytest.raises(RuntimeError, match="c 2"):
        call("c", unique_reply_rank=2)
    assert call("fine") == ["fine 0", "fine 1", "fine 2"]


def test_calls_that_are_not_waited_for_keep_their_order(call):
    first, second = call("a", non_block=True), call("good", unique_reply_rank=2, non_block=True)
    third = call("fine", non_block=True)
    assert third.result() == ["fine 0", "fine 1", "fine 2"]
    assert second.result() == "good 2"
    with pytest.raises(RuntimeError, match="a 0"):
        first.result()
