"""States of an engine in which new weights would not arrive: refused before anything is read."""

from collections.abc import Callable

import pytest

from tests.reload import cases
from tests.reload.lab import ReloadLab
from tests.reload.verdicts import refused_then_renewed, renewed, unharmed
from tests.support.snapshot import differences

pytestmark = pytest.mark.engine

Labs = Callable[[str], ReloadLab]


@pytest.mark.parametrize("job", cases.REFUSED_STATES)
def test_a_state_that_is_refused(reload_lab: Labs, job: str) -> None:
    refused_then_renewed(reload_lab(cases.way_of(job)), job, "UnsupportedError")


@pytest.mark.jobs(cases.NOTHING_TO_OFFLOAD)
def test_on_the_cpu_nothing_is_offloaded(reload_lab: Labs) -> None:
    lab = reload_lab(cases.way_of(cases.NOTHING_TO_OFFLOAD))
    (step,) = lab.ours[cases.NOTHING_TO_OFFLOAD]["steps"]
    renewed(step, lab, "llama")


@pytest.mark.parametrize("job", [cases.HOOK, cases.COMPUTES])
def test_models_that_compute_from_several_layers(reload_lab: Labs, job: str) -> None:
    """Stock leaves the computed tensor as it was, or makes it of what it has not loaded yet."""
    lab = reload_lab(cases.way_of(job))
    stock, ours = lab.stock[job], lab.ours[job]
    fresh = lab.stock[f"fresh.{cases.kind_of(job)}"]["before"]
    (step,) = stock["steps"]
    assert step["error"] is not None or differences(step["snapshot"], fresh) != []
    (step,) = ours["steps"]
    unharmed(step, ours["before"])
    assert step["error"]["type"] == "ReloadUnsupportedError", step["error"]["traceback"]


@pytest.mark.jobs(cases.TIED)
def test_a_tied_head_takes_its_other_name_as_a_repetition_only(reload_lab: Labs) -> None:
    lab = reload_lab(cases.way_of(cases.TIED))
    result = lab.ours[cases.TIED]
    other, alone, equal = result["steps"]
    for step in (other, alone):
        unharmed(step, result["before"])
        assert "Send model.embed_tokens.weight" in step["error"]["message"]
    renewed(equal, lab, "llama-tied")


@pytest.mark.parametrize("job", cases.RETIED)
def test_a_head_that_was_tied_after_loading(reload_lab: Labs, job: str) -> None:
    lab = reload_lab(cases.way_of(job))
    result = lab.ours[job]
    other, head, both, back, embeddings = result["steps"]
    unharmed(other, result["before"])
    assert "sent with different contents" in other["error"]["message"]
    unharmed(head, result["before"])
    assert "Send model.embed_tokens too" in head["error"]["message"]
    renewed(both, lab, "llama-retied")
    assert differences(back["snapshot"], result["before"]) == []
    renewed(embeddings, lab, "llama-retied")


@pytest.mark.jobs(cases.UNTIED)
def test_a_head_that_the_checkpoint_has_in_spite_of_the_configuration(reload_lab: Labs) -> None:
    lab = reload_lab(cases.way_of(cases.UNTIED))
    result = lab.ours[cases.UNTIED]
    there, back = result["steps"]
    renewed(there, lab, "llama-untied")
    assert differences(back["snapshot"], result["before"]) == []
