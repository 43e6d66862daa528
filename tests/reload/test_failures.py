"""Whatever is wrong with what is sent: an error that names it, the old weights, and a next reload."""

from collections.abc import Callable

import pytest

from tests.reload import cases
from tests.reload.lab import ReloadLab
from tests.reload.verdicts import refused_then_renewed, renewed, unharmed

pytestmark = pytest.mark.engine

Labs = Callable[[str], ReloadLab]


@pytest.mark.parametrize(("job", "error", "named"), cases.FAULTS)
def test_a_fault_in_what_is_sent(reload_lab: Labs, job: str, error: str, named: str) -> None:
    refused_then_renewed(reload_lab(cases.way_of(job)), job, error, named)


@pytest.mark.jobs(cases.RAISES)
def test_an_iterator_that_raises_at_any_position(reload_lab: Labs) -> None:
    lab = reload_lab(cases.way_of(cases.RAISES))
    result = lab.ours[cases.RAISES]
    *failed, good = result["steps"]
    assert len(failed) == len(cases.POSITIONS)
    for step in failed:
        unharmed(step, result["before"])
        assert step["error"]["type"] == "ReloadSourceError"
        assert "OSError: the trainer went away" in step["error"]["message"]
    renewed(good, lab, "llama-kv-head")


@pytest.mark.jobs(cases.PACKED_COPY)
def test_kernel_format_refuses_what_native_code_has_packed(reload_lab: Labs) -> None:
    """The embedding's weight could be written; the copy that its kernel reads could not."""
    result = reload_lab(cases.way_of(cases.PACKED_COPY)).ours[cases.PACKED_COPY]
    (step,) = result["steps"]
    unharmed(step, result["before"])
    assert step["error"]["type"] == "ReloadInPlaceError"
    assert "model.embed_tokens" in step["error"]["message"]


@pytest.mark.jobs(cases.BY_LAYER)
def test_by_layer_each_is_whole_and_the_error_lists_the_new(reload_lab: Labs) -> None:
    lab = reload_lab(cases.way_of(cases.BY_LAYER))
    result = lab.ours[cases.BY_LAYER]
    failed, good = result["steps"]
    before, fresh = result["before"], lab.stock["fresh.llama"]["before"]
    assert failed["error"]["type"] == "ReloadSourceError"
    new = {x.strip() for x in failed["error"]["message"].splitlines() if x.startswith("  ")}
    assert new
    units = set()
    for part in ("tensors", "kernels"):
        for path, entry in failed["snapshot"][part].items():
            unit = path.split(":")[0] if part == "kernels" else path.rpartition(".")[0]
            wanted = fresh if unit in new else before
            assert entry == wanted[part][path], path
            if fresh[part][path] != before[part][path]:
                units.add(unit)
    assert new < units, "some layers are new, and some are not"
    assert failed["moved"] == []
    renewed(good, lab, "llama")


@pytest.mark.jobs(cases.NO_ROOM)
def test_a_host_without_room_for_the_old_weights(reload_lab: Labs) -> None:
    lab = reload_lab(cases.way_of(cases.NO_ROOM))
    refused_then_renewed(lab, cases.NO_ROOM, "RoomError", "VSS_RELOAD_ATOMIC=layer")


@pytest.mark.jobs(cases.RANDOM_FAULTS)
def test_an_engine_without_a_checkpoint_of_its_own_is_as_strict(reload_lab: Labs) -> None:
    lab = reload_lab(cases.way_of(cases.RANDOM_FAULTS))
    result = lab.ours[cases.RANDOM_FAULTS]
    unknown, part, good = result["steps"]
    for step, name in (
        (unknown, "model.nowhere.weight"),
        (part, "model.layers.1.self_attn.qkv_proj.weight: 8192 of 32768 elements"),
    ):
        unharmed(step, result["before"])
        assert name in step["error"]["message"]
    renewed(good, lab, "llama")


@pytest.mark.jobs(cases.COLLECTS)
def test_a_model_that_collects_tensors_before_it_loads_them(reload_lab: Labs) -> None:
    lab = reload_lab(cases.way_of(cases.COLLECTS))
    (step,) = lab.ours[cases.COLLECTS]["steps"]
    renewed(step, lab, "bert")
