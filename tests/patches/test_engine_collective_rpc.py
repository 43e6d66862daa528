"""The patch of the engine core's `collective_rpc`, and what it hands over to, on toys of engines."""

import pickle
from collections import deque
from types import SimpleNamespace
from typing import Any

import pytest
from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorBase_V1
from vllm.v1.engine.core import DPEngineCoreProc, EngineCore
from vllm.v1.executor.multiproc_executor import MultiprocExecutor, WorkerProc

from vllm_sharded_state.errors import (
    OptionError,
    ReloadAsleepError,
    ReloadBusyError,
    ReloadCacheError,
    ReloadPeerError,
    ReloadScaleError,
)
from vllm_sharded_state.patches import engine_collective_rpc
from vllm_sharded_state.reload.attempt import attempt


class Scheduler:
    """What of a scheduler is looked at; `log` gets what it is told to do."""

    def __init__(self, log: list[str]) -> None:
        self.log = log
        self.connector: Any = None
        self.requests: dict[str, Any] = {}
        self.running: list[Any] = []
        self.blocks: dict[str, tuple[list[int], ...]] = {}
        self.kv_cache_manager = SimpleNamespace(get_block_ids=lambda n: self.blocks.get(n, ([],)))

    def get_kv_connector(self) -> Any:
        return self.connector

    def get_request_counts(self) -> tuple[int, int]:
        return len(self.running), 0

    def reset_encoder_cache(self) -> None:
        self.log.append("encodings")


class Executor:
    """Calls the workers one after the other, as real ones do it side by side."""

    def __init__(self, log: list[str], workers: list[Any]) -> None:
        self.log, self.workers = log, workers
        self.sleeping_tags: set[str] = set()

    def collective_rpc(self, method: Any, timeout: Any, args: tuple, kwargs: Any) -> list[Any]:
        if not callable(method):
            self.log.append(method)
            return [(method, args, kwargs) for _ in self.workers]
        return [
            pickle.loads(pickle.dumps(method(worker, *args, **(kwargs or {}))))
            for worker in self.workers
        ]

    def reset_encoder_cache(self) -> None:
        self.log.append("workers' encodings")


class Worker:
    def __init__(self, log: list[str], error: Exception | None = None) -> None:
        self.log, self.error = log, error

    def reload_weights(self, *args: Any, **kwargs: Any) -> Any:
        self.log.append("weights")
        if self.error is not None:
            raise self.error
        return args, kwargs

    update_weights = finish_weight_update = start_weight_update = reload_weights


def an_engine(*errors: Exception | None, kind: type = EngineCore) -> Any:
    engine = kind.__new__(kind)
    engine.log = []
    engine.scheduler = Scheduler(engine.log)
    engine.model_executor = Executor(engine.log, [Worker(engine.log, e) for e in errors or [None]])
    engine.batch_queue = None
    engine.cleared = True

    def reset_prefix_cache(**how: bool) -> bool:
        assert how == {"reset_running_requests": True, "reset_connector": True}
        engine.log.append("blocks")
        if isinstance(engine.cleared, Exception):
            raise engine.cleared
        return engine.cleared

    engine.reset_prefix_cache = reset_prefix_cache
    return engine


@pytest.fixture(autouse=True)
def applied():
    engine_collective_rpc.PATCH.apply()
    yield
    engine_collective_rpc.PATCH.undo()


def test_other_methods_pass_as_they_are():
    engine = an_engine()
    engine.model_executor.sleeping_tags = {"weights"}
    assert engine.collective_rpc("list_loras", None, (1,), {"kv_cache": 2}) == [
        ("list_loras", (1,), {"kv_cache": 2})
    ]
    assert engine.collective_rpc(lambda worker, x: x, args=(3,)) == [3]
    assert engine.log == ["list_loras"]


def test_results_come_back_and_workers_see_no_kv_cache():
    engine = an_engine(None, None)
    given = {"weights_path": "path", "kv_cache": "keep"}
    assert (
        engine.collective_rpc("reload_weights", 3.0, ("a",), given)
        == [(("a",), {"weights_path": "path"})] * 2
    )
    assert given["kv_cache"] == "keep"


CLEARED = ["blocks", "encodings"]


@pytest.mark.parametrize(
    ("method", "log"),
    [
        ("reload_weights", ["weights", *CLEARED]),
        ("finish_weight_update", ["weights", *CLEARED, "workers' encodings"]),
        ("update_weights", ["weights", "encodings"]),
        ("start_weight_update", ["weights"]),
    ],
)
def test_what_is_cleared_after_each(method, log):
    engine = an_engine()
    engine.collective_rpc(method)
    assert engine.log == log


def test_keep_as_the_call_or_the_environment_says(monkeypatch):
    engine = an_engine()
    engine.collective_rpc("reload_weights", kwargs={"kv_cache": "keep"})
    monkeypatch.setenv("VSS_RELOAD_KV_CACHE", "keep")
    engine.collective_rpc("reload_weights")
    # Images are encoded anew all the same: the workers forget their encodings.
    assert engine.log == ["weights", "encodings"] * 2
    engine.collective_rpc("reload_weights", kwargs={"kv_cache": "clear"})
    assert engine.log[4:] == ["weights", *CLEARED]


def test_a_choice_that_means_nothing(monkeypatch):
    engine = an_engine()
    with pytest.raises(OptionError, match="kv_cache='drop'"):
        engine.collective_rpc("reload_weights", kwargs={"kv_cache": "drop"})
    monkeypatch.setenv("VSS_RELOAD_KV_CACHE", "drop")
    with pytest.raises(OptionError, match="VSS_RELOAD_KV_CACHE='drop'"):
        engine.collective_rpc("reload_weights")
    assert engine.log == []


def an_error(kind: type[Exception], changed: bool = False) -> Exception:
    error = kind("told")
    if changed:
        error.changed = True
    return error


@pytest.mark.parametrize(
    ("method", "error", "cleared"),
    [
        ("reload_weights", an_error(ReloadScaleError), []),
        ("reload_weights", an_error(ReloadScaleError, changed=True), CLEARED),
        ("reload_weights", RuntimeError("of vLLM's own reload"), CLEARED),
        ("update_weights", an_error(ReloadScaleError), CLEARED),
        ("finish_weight_update", an_error(ReloadScaleError), CLEARED),
        ("start_weight_update", RuntimeError("no engine"), []),
    ],
)
def test_what_is_cleared_after_a_failure(method, error, cleared):
    engine = an_engine(error)
    with pytest.raises(type(error), match=str(error)):
        engine.collective_rpc(method)
    assert engine.log == ["weights", *cleared]


def test_a_call_whose_end_is_not_known_counts_as_a_change():
    engine = an_engine()

    def times_out(*_):
        raise TimeoutError("RPC call timed out")

    engine.model_executor.collective_rpc = times_out
    with pytest.raises(TimeoutError):
        engine.collective_rpc("reload_weights", 0.1)
    assert engine.log == CLEARED


def test_the_worker_that_failed_by_itself_is_heard():
    peer = ReloadPeerError("Other ranks could not take the new weights")
    engine = an_engine(peer, ReloadScaleError("v_scale holds nan"), peer)
    with pytest.raises(ReloadScaleError, match="v_scale holds nan"):
        engine.collective_rpc("reload_weights")


def test_an_error_that_cannot_travel_does():
    class Odd(Exception):
        def __init__(self, a, b):
            super().__init__(f"{a} and {b}")

    worker = Worker([], Odd(1, 2))
    answer = pickle.loads(pickle.dumps(attempt(worker, "reload_weights", (), {})))
    assert type(answer.error) is RuntimeError
    assert str(answer.error) == "Odd: 1 and 2"


@pytest.mark.parametrize("method", ["reload_weights", "start_weight_update", "update_weights"])
def test_asleep(method):
    engine = an_engine()
    engine.model_executor.sleeping_tags = {"weights", "kv_cache"}
    with pytest.raises(ReloadAsleepError, match="wake_up"):
        engine.collective_rpc(method)
    assert engine.log == []
    engine.model_executor.sleeping_tags = {"kv_cache"}
    engine.collective_rpc(method)


@pytest.mark.parametrize(("running", "paused"), [(True, True), (False, False), (True, False)])
def test_data_parallel_experts_have_to_be_paused(running, paused):
    engine = an_engine(kind=DPEngineCoreProc)
    engine.engines_running, engine.is_scheduler_paused = running, lambda: paused
    with pytest.raises(ReloadBusyError, match="pause_generation"):
        engine.collective_rpc("reload_weights")
    assert engine.log == []
    engine.engines_running, engine.is_scheduler_paused = False, lambda: True
    engine.collective_rpc("reload_weights")


class Resets:
    def reset_cache(self) -> bool:
        return True


class Forgetful:
    reset_cache = KVConnectorBase_V1.reset_cache


@pytest.mark.parametrize(
    "connector", [Forgetful(), SimpleNamespace(_connectors=[Resets(), Forgetful()])]
)
def test_a_connector_that_cannot_forget_is_refused_first(connector):
    engine = an_engine()
    engine.scheduler.connector = connector
    with pytest.raises(ReloadCacheError, match="Forgetful keeps KV blocks"):
        engine.collective_rpc("reload_weights")
    assert engine.log == []
    engine.collective_rpc("reload_weights", kwargs={"kv_cache": "keep"})


def test_blocks_in_transfer_are_refused_first():
    engine = an_engine()
    engine.scheduler.connector = Resets()
    engine.collective_rpc("reload_weights")
    engine.scheduler.running = [SimpleNamespace(request_id="runs")]
    engine.scheduler.requests = {"runs": object(), "sends": object()}
    engine.scheduler.blocks = {"runs": ([1, 2],)}
    engine.collective_rpc("reload_weights")
    engine.log.clear()
    engine.scheduler.blocks["sends"] = ([], [3])
    with pytest.raises(ReloadCacheError, match="still transfers"):
        engine.collective_rpc("reload_weights")
    del engine.scheduler.blocks["sends"]
    engine.batch_queue = [object()]
    with pytest.raises(ReloadCacheError, match="still transfers"):
        engine.collective_rpc("reload_weights")
    assert engine.log == []


@pytest.mark.parametrize("outcome", [False, RuntimeError("waiting for remote KV transfer")])
def test_blocks_that_stay_are_told(outcome):
    engine = an_engine()
    engine.cleared = outcome
    with pytest.raises(ReloadCacheError, match="can't be cleared"):
        engine.collective_rpc("reload_weights")
    assert engine.log == ["weights", *CLEARED]


def test_upstream_takes_the_answers_behind_a_failure_for_answers_to_the_next_call():
    """Why errors travel as answers."""
    failed, fine = (
        WorkerProc.ResponseStatus.FAILURE,
        WorkerProc.ResponseStatus.SUCCESS,
    )
    executor = MultiprocExecutor.__new__(MultiprocExecutor)
    executor.is_failed, executor.futures_queue = False, deque()
    executor.rpc_broadcast_mq = SimpleNamespace(enqueue=lambda _: None)
    answers = [deque([(failed, "bad weights"), (fine, "second")]) for _ in range(2)]
    executor.response_mqs = [
        SimpleNamespace(dequeue=lambda timeout, q=q: q.popleft()) for q in answers
    ]
    for _ in range(2):
        with pytest.raises(RuntimeError, match="bad weights"):
            executor.collective_rpc("anything")
