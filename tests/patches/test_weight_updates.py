"""The patches of updates that come in calls: handed over, or left to upstream, wherever they reach."""

import logging
from contextlib import nullcontext
from types import SimpleNamespace

import pytest
import torch
from vllm.model_executor.model_loader import reload
from vllm.model_executor.model_loader.reload import inplace, layerwise, torchao_decorator

from vllm_sharded_state.patches import (
    finalize_layerwise_reload,
    initialize_layerwise_reload,
    worker_finish_weight_update,
    worker_start_weight_update,
    worker_update_weights,
)
from vllm_sharded_state.patches.inward import stand_in
from vllm_sharded_state.reload import session

LAYERWISE = (initialize_layerwise_reload, finalize_layerwise_reload)


@pytest.fixture(params=LAYERWISE, ids=lambda module: module.PATCH.name)
def patch(request):
    request.param.PATCH.apply()
    yield request.param
    request.param.PATCH.undo()


def test_the_package_gives_the_replacement_and_upstreams_own_callers_do_not(patch):
    replacement = getattr(layerwise, patch.PATCH.symbol)
    assert getattr(reload, patch.PATCH.symbol) is replacement
    for module in (inplace, torchao_decorator):
        assert getattr(module, patch.PATCH.symbol) is replacement.__wrapped__


@pytest.mark.parametrize("is_ours", [True, False])
def test_initialize_runs_the_original_where_no_transaction_began(is_ours):
    seen, model = [], torch.nn.Module()
    patched = initialize_layerwise_reload.make(seen.append)
    with stand_in("reload.session", "begin", lambda given: is_ours and given is model):
        patched(model)
    assert seen == ([] if is_ours else [model])


@pytest.mark.parametrize("is_ours", [True, False])
def test_finalize_runs_the_original_where_no_transaction_was_begun(is_ours):
    seen, model = [], torch.nn.Module()
    patched = finalize_layerwise_reload.make(lambda *args: seen.append(args))
    with stand_in("reload.session", "finish", lambda given: is_ours and given is model):
        patched(model, "config")
    assert seen == ([] if is_ours else [(model, "config")])


def test_a_model_of_unknown_construction_is_left_to_upstream_with_a_warning(caplog, monkeypatch):
    monkeypatch.setattr(logging.getLogger("vllm"), "propagate", True)
    model = torch.nn.Module()
    assert session.begin(model) is False
    assert "not known from which configuration" in caplog.text
    assert session.finish(model) is False


def test_finalize_takes_upstreams_names():
    seen = []
    patched = finalize_layerwise_reload.make(lambda model, model_config: seen.append(model_config))
    with stand_in("reload.session", "finish", lambda model: False):
        patched(model="model", model_config="config")
    assert seen == ["config"]


@pytest.mark.parametrize(
    ("module", "method", "arguments", "agree"),
    [
        (worker_update_weights, "update_weights", ("info",), True),
        (worker_finish_weight_update, "finish_weight_update", (), False),
    ],
)
def test_a_workers_call_is_a_step(module, method, arguments, agree):
    seen, wrapper = [], SimpleNamespace(worker=SimpleNamespace())
    patched = module.make(lambda *args: seen.append(args))

    def step(given, agree):
        seen.append((given, agree))
        return nullcontext()

    with stand_in("reload.worker", "step", step):
        patched(wrapper, *arguments)
    assert seen == [(wrapper.worker, agree), (wrapper, *arguments)]
    assert patched.__name__ == method


def test_a_workers_start_is_announced_first():
    seen, wrapper = [], SimpleNamespace(worker=SimpleNamespace())
    patched = worker_start_weight_update.make(lambda *args: seen.append(args))
    with stand_in("reload.worker", "starting", seen.append):
        patched(wrapper)
    assert seen == [wrapper.worker, (wrapper,)]
