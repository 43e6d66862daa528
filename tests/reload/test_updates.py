"""New weights in a running model: afterwards it holds what a cold load of them holds, where it lay."""

from collections.abc import Callable

import pytest

from tests.reload import cases
from tests.reload.lab import ReloadLab
from tests.support.snapshot import differences

pytestmark = pytest.mark.engine

Labs = Callable[[str], ReloadLab]


@pytest.mark.parametrize(
    "job",
    [
        pytest.param(job, marks=() if default else pytest.mark.full)
        for job, default in cases.UPDATES
    ],
)
def test_an_update_gives_what_a_cold_load_gives_in_place(reload_lab: Labs, job: str) -> None:
    lab = reload_lab(cases.way_of(job))
    result = lab.ours[job]
    assert result["error"] is None, result["error"]
    there, back = result["steps"]
    for step in (there, back):
        assert step["error"] is None, step["error"]["traceback"]
        assert step["moved"] == []
    fresh = lab.stock[f"fresh.{cases.kind_of(job)}"]
    assert differences(there["snapshot"], fresh["before"]) == []
    assert differences(result["before"], fresh["before"]) != []
    assert differences(back["snapshot"], result["before"]) == []


@pytest.mark.parametrize("job", cases.TEN)
def test_addresses_hold_over_ten_updates(reload_lab: Labs, job: str) -> None:
    lab = reload_lab(cases.way_of(job))
    result, fresh = lab.ours[job], lab.stock[f"fresh.{cases.kind_of(job)}"]
    assert len(result["steps"]) == 10
    for number, step in enumerate(result["steps"]):
        assert step["error"] is None, step["error"]["traceback"]
        assert step["moved"] == []
        wanted = result["before"] if number % 2 else fresh["before"]
        assert differences(step["snapshot"], wanted) == []


@pytest.mark.jobs(cases.ONE_LAYER)
def test_a_whole_layer_alone_changes_that_layer_alone(reload_lab: Labs) -> None:
    lab = reload_lab(cases.way_of(cases.ONE_LAYER))
    result, fresh = lab.ours[cases.ONE_LAYER], lab.stock["fresh.llama"]["before"]
    (step,) = result["steps"]
    assert step["error"] is None, step["error"]["traceback"]
    changed = {
        name: entry
        for part in ("tensors", "kernels")
        for name, entry in step["snapshot"][part].items()
        if entry != result["before"][part][name]
    }
    layer = "model.layers.1.mlp.gate_up_proj"
    assert changed == {
        f"{layer}.weight": fresh["tensors"][f"{layer}.weight"],
        f"{layer}:apply": fresh["kernels"][f"{layer}:apply"],
    }


@pytest.mark.parametrize("job", [cases.FROM_PATH, cases.FROM_PATH_DUMMY])
def test_from_a_path_whatever_the_engine_was_started_with(reload_lab: Labs, job: str) -> None:
    lab = reload_lab(cases.way_of(job))
    (step,) = lab.ours[job]["steps"]
    assert step["error"] is None, step["error"]["traceback"]
    assert step["renamed"]  # as upstream: the configuration names what is loaded now
    fresh = lab.stock[f"fresh.{cases.kind_of(job)}"]["before"]
    assert differences(step["snapshot"], fresh) == []
