"""Updates that come in calls: `initialize_layerwise_reload`, `load_weights` again and again, and
`finalize_layerwise_reload`, as weight-transfer engines and trainers make them.
"""

from collections.abc import Callable
from typing import Any

import pytest

from tests.reload import cases
from tests.reload.lab import ReloadLab
from tests.reload.verdicts import refused_then_renewed, renewed, unharmed
from tests.support.snapshot import differences

pytestmark = pytest.mark.engine

Labs = Callable[[str], ReloadLab]


def _ours(labs: Labs, job: str) -> tuple[dict[str, Any], ReloadLab]:
    lab = labs(cases.way_of(job))
    assert lab.ours[job]["error"] is None, lab.ours[job]["error"]
    return lab.ours[job], lab


@pytest.mark.parametrize("job", cases.IN_CALLS)
def test_calls_cut_anywhere_give_what_a_cold_load_gives(reload_lab: Labs, job: str) -> None:
    result, lab = _ours(reload_lab, job)
    there, back = result["steps"]
    renewed(there, lab, cases.kind_of(job))
    assert back["error"] is None, back["error"]["traceback"]
    assert differences(back["snapshot"], result["before"]) == []
    assert there["moved"] == back["moved"] == []


@pytest.mark.jobs(cases.UPDATE)
def test_load_weights_returns_what_it_returns_in_stock(reload_lab: Labs) -> None:
    result, lab = _ours(reload_lab, cases.UPDATE)
    (ours,), (stock,) = result["steps"], lab.stock[cases.UPDATE]["steps"]
    renewed(ours, lab, "llama")
    assert ours["loaded"] == stock["loaded"] != []


@pytest.mark.jobs(cases.UPDATE_PART)
def test_a_part_of_a_fused_layer(reload_lab: Labs) -> None:
    lab = reload_lab(cases.way_of(cases.UPDATE_PART))
    stock, weight = lab.stock[cases.UPDATE_PART], "model.layers.0.self_attn.qkv_proj.weight"
    assert stock["steps"][0]["error"] is None
    assert stock["steps"][0]["snapshot"]["tensors"][weight] != stock["before"]["tensors"][weight]
    missing = "model.layers.0.self_attn.k_proj.weight"
    refused_then_renewed(lab, cases.UPDATE_PART, "IncompleteError", missing)


@pytest.mark.jobs(cases.UPDATE_FAILS)
def test_a_sender_that_fails_leaves_no_meta_tensors(reload_lab: Labs) -> None:
    """The trainer dies between two calls, and another one starts anew."""
    result, lab = _ours(reload_lab, cases.UPDATE_FAILS)
    assert lab.stock[cases.UPDATE_FAILS]["steps"][0]["meta"]
    failed, good = result["steps"]
    assert failed["error"]["type"] == "OSError"
    assert failed["meta"] == failed["moved"] == []
    renewed(good, lab, "llama")


@pytest.mark.jobs(cases.UPDATE_REUSED)
def test_a_sender_that_reuses_its_memory(reload_lab: Labs) -> None:
    """Calls of two tensors: k of a fused layer has come with q, and v comes later."""
    result, lab = _ours(reload_lab, cases.UPDATE_REUSED)
    (stock,) = lab.stock[cases.UPDATE_REUSED]["steps"]
    assert differences(stock["snapshot"], lab.stock["fresh.llama"]["before"]) != []
    renewed(result["steps"][0], lab, "llama")


@pytest.mark.parametrize(("job", "error", "named"), cases.UPDATE_FAULTS)
def test_a_fault_in_what_is_sent(reload_lab: Labs, job: str, error: str, named: str) -> None:
    refused_then_renewed(reload_lab(cases.way_of(job)), job, error, named)


@pytest.mark.jobs(cases.UPDATE_SCALES)
def test_kv_scales_alone(reload_lab: Labs) -> None:
    result, lab = _ours(reload_lab, cases.UPDATE_SCALES)
    (step,) = result["steps"]
    assert step["error"] is None, step["error"]["traceback"]
    fresh = lab.stock["fresh.llama-w8a8-kv"]["before"]
    scales = {path for path in fresh["numbers"] if path.endswith("_scale_float")}
    changed = {
        p for p in scales if step["snapshot"]["numbers"][p] != result["before"]["numbers"][p]
    }
    assert changed
    for path in scales:
        assert step["snapshot"]["numbers"][path] == fresh["numbers"][path]
    assert step["snapshot"]["kernels"] == result["before"]["kernels"]


@pytest.mark.jobs(cases.ABANDONED)
def test_an_update_that_was_never_finished_is_taken_back_by_the_next(reload_lab: Labs) -> None:
    result, lab = _ours(reload_lab, cases.ABANDONED)
    abandoned, good = result["steps"]
    assert abandoned["error"] is None, abandoned["error"]["traceback"]
    assert differences(abandoned["snapshot"], result["before"]) != [], "whole layers are in place"
    assert abandoned["moved"] == abandoned["meta"] == []
    renewed(good, lab, "llama")


@pytest.mark.jobs(cases.MEANWHILE)
def test_a_reload_while_an_update_is_open_is_refused(reload_lab: Labs) -> None:
    result, lab = _ours(reload_lab, cases.MEANWHILE)
    sent, refused, finished = result["steps"]
    assert sent["error"] is None, sent["error"]["traceback"]
    assert refused["error"]["type"] == "ReloadBusyError"
    assert differences(refused["snapshot"], sent["snapshot"]) == []
    renewed(finished, lab, "llama")


@pytest.mark.jobs(cases.ENDED)
def test_what_is_sent_after_a_failure_is_refused_until_the_next_start(reload_lab: Labs) -> None:
    result, lab = _ours(reload_lab, cases.ENDED)
    failed, *late, good = result["steps"]
    assert failed["error"]["type"] == "ReloadUnexpectedError"
    for step in (failed, *late):
        unharmed(step, result["before"])
    for step in late:
        assert step["error"]["type"] == "ReloadEndedError"
        assert "The engine holds the weights it had before" in step["error"]["message"]
        assert "model.norm.weight was sent twice" in step["error"]["message"]
    renewed(good, lab, "llama")


@pytest.mark.jobs(cases.UPDATE_BY_LAYER)
def test_by_layer_what_is_new_stays(reload_lab: Labs) -> None:
    result, lab = _ours(reload_lab, cases.UPDATE_BY_LAYER)
    failed, good = result["steps"]
    assert differences(failed["snapshot"], result["before"]) != []
    assert failed["meta"] == failed["moved"] == []
    renewed(good, lab, "llama")


@pytest.mark.jobs(cases.BY_THEMSELVES)
def test_a_backend_that_writes_by_itself_is_left_to_vllm(reload_lab: Labs) -> None:
    """Upstream's own function puts the model on meta, where such a backend expects it."""
    result, _ = _ours(reload_lab, cases.BY_THEMSELVES)
    started, finished = result["steps"]
    assert started["meta"]
    assert finished["error"] is None, finished["error"]["traceback"]
    assert finished["snapshot"]["tensors"] == result["before"]["tensors"]
