"""The sharded state of an engine with new weights, in a running one: what a cold load of them holds."""

from collections.abc import Callable
from typing import Any

import pytest

from tests.reload import cases, sharded_cases
from tests.reload.lab import ReloadLab
from tests.reload.verdicts import renewed, unharmed
from tests.support.snapshot import differences

pytestmark = pytest.mark.engine

Labs = Callable[[str], ReloadLab]


def _steps(reload_lab: Labs, job: str) -> tuple[ReloadLab, dict[str, Any]]:
    lab = reload_lab(cases.way_of(job))
    result = lab.ours[job]
    assert result["error"] is None, result["error"]
    return lab, result


@pytest.mark.parametrize(
    "job",
    [
        pytest.param(job, marks=() if default else pytest.mark.full)
        for job, default in sharded_cases.UPDATES
    ],
)
def test_it_gives_what_a_cold_load_of_the_new_weights_gives_in_place(
    reload_lab: Labs, job: str
) -> None:
    lab, result = _steps(reload_lab, job)
    there, back = result["steps"]
    renewed(there, lab, cases.kind_of(job))
    assert there["renamed"]
    assert differences(result["before"], lab.stock[f"fresh.{cases.kind_of(job)}"]["before"]) != []
    assert back["error"] is None, back["error"]["traceback"]
    for step in (there, back):
        assert step["moved"] == []


@pytest.mark.parametrize("job", sharded_cases.OWN)
def test_without_a_path_the_own_is_read_again_whatever_it_is(reload_lab: Labs, job: str) -> None:
    """An engine on sharded state takes a checkpoint in the model's own format, and the reverse."""
    lab, result = _steps(reload_lab, job)
    own, new, new_again, old, old_again = result["steps"]
    for step in (own, old, old_again):
        assert step["error"] is None, step["error"]["traceback"]
        assert differences(step["snapshot"], result["before"]) == []
    for step in (new, new_again):
        renewed(step, lab, cases.kind_of(job))
    assert [step["renamed"] for step in result["steps"]] == [False, True, False, True, False]
    assert all(step["moved"] == [] for step in result["steps"])


@pytest.mark.parametrize("job", sharded_cases.OTHERS)
def test_an_engine_that_was_started_otherwise(reload_lab: Labs, job: str) -> None:
    lab, result = _steps(reload_lab, job)
    for step in result["steps"]:
        renewed(step, lab, cases.kind_of(job))
        assert step["moved"] == []


@pytest.mark.jobs(sharded_cases.TEN)
def test_addresses_hold_over_ten(reload_lab: Labs) -> None:
    lab, result = _steps(reload_lab, sharded_cases.TEN)
    assert len(result["steps"]) == 10
    assert all(step["moved"] == [] for step in result["steps"])
    for there, back in zip(result["steps"][::2], result["steps"][1::2], strict=True):
        renewed(there, lab, "llama-kv-head")
        assert differences(back["snapshot"], result["before"]) == []


@pytest.mark.parametrize(("job", "error", "named"), sharded_cases.FAULTS)
def test_a_fault_leaves_the_engine_as_it_was(
    reload_lab: Labs, job: str, error: str, named: str
) -> None:
    lab, result = _steps(reload_lab, job)
    failed, *good = result["steps"]
    unharmed(failed, result["before"])
    assert failed["error"]["type"] == error, failed["error"]["traceback"]
    assert named in failed["error"]["message"]
    for step in good:
        renewed(step, lab, cases.kind_of(job))


@pytest.mark.jobs(sharded_cases.BY_LAYER)
def test_by_layer_each_is_whole_and_the_error_lists_the_new(reload_lab: Labs) -> None:
    lab, result = _steps(reload_lab, sharded_cases.BY_LAYER)
    failed, good = result["steps"]
    before, fresh = result["before"], lab.stock["fresh.llama"]["before"]
    assert failed["error"]["type"] == "IncompleteError"
    said = failed["error"]["message"]
    told = said[said.index("These units hold new weights") :]
    new = {line.strip() for line in told.splitlines() if line.startswith("  ")}
    units = set()
    for path, entry in failed["snapshot"]["tensors"].items():
        unit = path.rpartition(".")[0]
        if fresh["tensors"][path] == before["tensors"][path]:
            continue
        units.add(unit)
        if "more" not in told:
            assert entry == (fresh if unit in new else before)["tensors"][path], path
        assert entry in (fresh["tensors"][path], before["tensors"][path])
    assert units - new, "some layers are old"
    assert units & new, "some layers are new"
    assert failed["moved"] == []
    renewed(good, lab, "llama")


@pytest.mark.jobs(sharded_cases.NO_ROOM)
def test_a_host_without_room_for_the_old_weights(reload_lab: Labs) -> None:
    lab, result = _steps(reload_lab, sharded_cases.NO_ROOM)
    failed, good = result["steps"]
    unharmed(failed, result["before"])
    assert failed["error"]["type"] == "ReloadRoomError"
    renewed(good, lab, "llama")


@pytest.mark.jobs(sharded_cases.AGAIN, sharded_cases.STARTED_AGAIN)
def test_what_was_given_can_be_saved_again(reload_lab: Labs) -> None:
    """Packed weights are read from the sharded state, though the engine was started from another."""
    lab, result = _steps(reload_lab, sharded_cases.AGAIN)
    renewed(result["steps"][0], lab, "llama-w8a8-kv")
    _, started = _steps(reload_lab, sharded_cases.STARTED_AGAIN)
    fresh = lab.stock["fresh.llama-w8a8-kv"]["before"]
    assert differences(started["before"], fresh) == []


@pytest.mark.jobs(sharded_cases.TOLD)
def test_the_report_tells_what_is_new(reload_lab: Labs) -> None:
    _, result = _steps(reload_lab, sharded_cases.TOLD)
    first, again, sent = (step["report"] for step in result["steps"])
    assert {"model.norm", "model.layers.1.self_attn.attn"} <= set(first["changed"])
    assert again["changed"] == sent["changed"] == first["untouched"] == []
    assert set(again["unchanged"]) == {*first["changed"], *first["unchanged"]}
    assert first["state"] == again["state"] == sent["state"]
    assert "sent" in sent
    assert "sent" not in first
