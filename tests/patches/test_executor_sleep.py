"""The patch of `Executor.sleep`: the workers learn that weights were thrown away, and only then."""

from typing import Any

import pytest
import torch
from vllm.v1.executor.abstract import Executor

from vllm_sharded_state.patches import executor_sleep
from vllm_sharded_state.reload import lost


class Toy:
    """An executor with one worker, whose calls it notes."""

    def __init__(self, error: Exception | None = None) -> None:
        self.sleeping_tags: set[str] = set()
        self.calls: list[Any] = []
        self.error = error

    def collective_rpc(self, method: Any, **_: Any) -> list[Any]:
        self.calls.append(method)
        if method == "sleep" and self.error is not None:
            raise self.error
        return [None]


@pytest.fixture(autouse=True)
def applied():
    executor_sleep.PATCH.apply()
    yield
    executor_sleep.PATCH.undo()


def test_the_workers_are_told_after_level_2():
    executor: Any = Toy()
    Executor.sleep(executor, 2)
    assert executor.calls == ["sleep", lost.note]
    assert executor.sleeping_tags == {"weights", "kv_cache"}
    Executor.sleep(executor, 2)  # asleep already: upstream warns, and does nothing
    assert executor.calls == ["sleep", lost.note]


def test_level_1_loses_nothing():
    executor: Any = Toy()
    Executor.sleep(executor)
    assert executor.calls == ["sleep"]


def test_they_are_told_when_it_fails_too():
    executor: Any = Toy(AssertionError("Memory usage increased after sleeping."))
    with pytest.raises(AssertionError, match="Memory usage"):
        Executor.sleep(executor, 2)
    assert executor.calls == ["sleep", lost.note]


class Worker:
    def __init__(self, model: torch.nn.Module, saved: dict[str, torch.Tensor]) -> None:
        self.model, self._sleep_saved_parameters = model, saved

    def get_model(self) -> torch.nn.Module:
        return self.model


def test_a_worker_notes_it_but_for_the_cpus_which_cannot_sleep(monkeypatch):
    model = torch.nn.Linear(2, 2)
    lost.note(Worker(model, {}))
    assert not lost.is_lost(model)
    monkeypatch.setattr(lost.current_platform, "is_cpu", lambda: False)
    lost.note(Worker(model, {"bias": torch.zeros(2)}))
    assert lost.is_lost(model)
    lost.found(model)
    assert not lost.is_lost(model)
