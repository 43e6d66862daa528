"""The patches of what a worker's wrapper hands on: arguments of ours, answers, upstream as it was."""

from types import SimpleNamespace
from typing import Any

import pytest
from torch import nn
from vllm.v1.worker.worker_base import WorkerWrapperBase

from tests.patches.stand_ins import stand_for
from vllm_sharded_state.errors import OptionError, ReloadArgumentError
from vllm_sharded_state.patches import (
    reload_weights,
    worker_reload_weights,
    worker_weight_checksums,
)
from vllm_sharded_state.patches.inward import stand_in
from vllm_sharded_state.reload import call


class Worker:
    """As upstream's: hands everything to the model runner, and drops what that returns."""

    def __init__(self) -> None:
        self.model_runner = self
        self.calls: list[tuple[tuple[Any, ...], dict[str, Any], call.Call]] = []
        self.vllm_config = "config"

    def get_model(self) -> str:
        return "model"

    def compute_weight_checksums(self) -> dict[str, str]:
        return {"tp0:weight": "checksum"}


def _reload(worker: Worker) -> Any:
    """Not a method, so that the runner's can have another signature."""

    def reload_weights(*args: Any, **kwargs: Any) -> None:
        running = call.running()
        worker.calls.append((args, kwargs, running))
        running.report = {"changed": []}

    return reload_weights


@pytest.fixture
def wrapper() -> Any:
    def upstreams(weights_iterator=None, weights_path=None, is_checkpoint_format=True): ...

    wrapper = WorkerWrapperBase()
    wrapper.worker = worker = Worker()
    worker.model_runner = SimpleNamespace(reload_weights=upstreams)
    worker.reload_weights = _reload(worker)
    return wrapper


@pytest.fixture
def applied():
    worker_reload_weights.PATCH.apply()
    worker_weight_checksums.PATCH.apply()
    yield
    worker_reload_weights.PATCH.undo()
    worker_weight_checksums.PATCH.undo()


def test_stock_hands_on_what_it_does_not_know_and_answers_nothing(wrapper):
    assert wrapper.reload_weights(weights_path="path", atomic="layer") is None
    ((_, kwargs, _),) = wrapper.worker.calls
    assert kwargs == {"weights_path": "path", "atomic": "layer"}  # the runner would refuse it
    with pytest.raises(TypeError, match="state"):
        wrapper.compute_weight_checksums(state=True)


def test_our_arguments_are_known_during_the_call_and_the_answer_comes_back(applied, wrapper):
    assert wrapper.reload_weights("weights", atomic="layer", digest=True) == {"changed": []}
    assert wrapper.reload_weights(weights_path="path", digest=False) == {"changed": []}
    (args, kwargs, first), (_, path, second) = wrapper.worker.calls
    assert (args, kwargs, path) == (("weights",), {}, {"weights_path": "path"})
    assert (first.atomic, first.digest) == ("layer", True)
    assert (second.atomic, second.digest) == (None, False)
    assert call.running().atomic is None


def test_the_environment_is_the_default(monkeypatch):
    monkeypatch.setenv("VSS_RELOAD_ATOMIC", "layer")
    monkeypatch.setenv("VSS_RELOAD_DIGEST", "1")
    asked = call.running()
    assert (asked.wanted_atomic(nn.Module()), asked.wants_digest()) == ("layer", True)
    with call.made(atomic="model", digest=False) as made:
        assert (made.wanted_atomic(nn.Module()), made.wants_digest()) == ("model", False)
        assert call.running() is made


def test_an_unknown_argument_is_named_before_anything_is_read(applied, wrapper):
    with pytest.raises(ReloadArgumentError, match="atomik, weights_pth") as caught:
        wrapper.reload_weights(weights_pth="path", atomik="layer")
    assert isinstance(caught.value, TypeError)
    assert "is_checkpoint_format" in str(caught.value)
    assert wrapper.worker.calls == []


@pytest.mark.parametrize("given", [{"atomic": "half"}, {"digest": "yes"}, {"atomic": ["layer"]}])
def test_a_value_that_means_nothing(applied, wrapper, given):
    with pytest.raises(OptionError, match="means nothing; give one of"):
        wrapper.reload_weights(**given)
    assert wrapper.worker.calls == []


def test_a_call_that_fails_leaves_no_choices_behind(applied, wrapper):
    def fails(**_: Any) -> None:
        raise OSError("gone")

    wrapper.worker.reload_weights = fails
    with pytest.raises(OSError, match="gone"):
        wrapper.reload_weights(atomic="layer")
    assert call.running().atomic is None


def test_upstreams_own_reload_refuses_our_arguments():
    calls: list[Any] = []
    patched = reload_weights.make(lambda *args: calls.append(args))
    with stand_in("reload.unsupported", "reason", lambda *_: "it is odd"):
        with call.made(digest=True), pytest.raises(ReloadArgumentError, match=r"digest.*it is odd"):
            patched("config", "model", "weights", None, True)
        assert calls == []
        with call.made() as made:
            patched("config", "model", "weights", None, True)
    assert len(calls) == 1
    assert made.report is None


def test_checksums_of_parameters_are_upstreams_and_of_all_are_ours(applied, wrapper, monkeypatch):
    digest = stand_for(monkeypatch, "state.digest", "state_digest")
    digest.answer = {"state": "ours"}
    assert wrapper.compute_weight_checksums() == {"tp0:weight": "checksum"}
    assert digest == []
    assert wrapper.compute_weight_checksums(state=True) == {"state": "ours"}
    assert digest == [(("model", "config"), {})]


def test_other_methods_are_handed_on_as_before(applied, wrapper):
    assert wrapper.get_model() == "model"
    worker_reload_weights.PATCH.undo()
    assert "reload_weights" not in vars(WorkerWrapperBase)
