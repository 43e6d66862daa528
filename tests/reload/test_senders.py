"""How tensors are sent: whatever a sender does with its memory, nothing else is taken than it sent."""

from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from tests.reload import cases, sender_cases
from tests.reload.lab import ReloadLab
from tests.reload.verdicts import refused_then_renewed, renewed, unharmed
from tests.support.snapshot import differences
from vllm_sharded_state.errors import ReloadSourceError
from vllm_sharded_state.reload.memory import SenderMemory

Labs = Callable[[str], ReloadLab]


@pytest.mark.engine
@pytest.mark.parametrize(("job", "error", "named"), sender_cases.SENDERS)
def test_a_sender_that_can_not_be_followed(
    reload_lab: Labs, job: str, error: str, named: str
) -> None:
    refused_then_renewed(reload_lab(cases.way_of(job)), job, error, named)


@pytest.mark.engine
@pytest.mark.parametrize("job", sender_cases.BUFFERS)
def test_memory_may_be_used_again_when_its_layer_is_whole(reload_lab: Labs, job: str) -> None:
    lab = reload_lab(cases.way_of(job))
    (step,) = lab.ours[job]["steps"]
    renewed(step, lab, "llama")


@pytest.mark.engine
@pytest.mark.jobs(sender_cases.HUGE)
def test_a_scale_is_judged_as_the_number_that_it_becomes(reload_lab: Labs) -> None:
    lab = reload_lab(cases.way_of(sender_cases.HUGE))
    refused_then_renewed(lab, sender_cases.HUGE, "ScaleError")


@pytest.mark.engine
@pytest.mark.jobs(sender_cases.MIRROR, sender_cases.TWO_CONTENTS, sender_cases.SECOND_NAMES)
def test_kernel_format_takes_one_content_for_one_tensor(reload_lab: Labs) -> None:
    result = reload_lab(cases.way_of(sender_cases.MIRROR)).ours[sender_cases.MIRROR]
    (step,) = result["steps"]
    unharmed(step, result["before"])
    assert "repeats model.layers.0.self_attn.attn._k_scale" in step["error"]["message"]

    result = reload_lab(cases.way_of(sender_cases.TWO_CONTENTS)).ours[sender_cases.TWO_CONTENTS]
    two, one = result["steps"]
    unharmed(two, result["before"])
    assert "are one tensor in the running model" in two["error"]["message"]
    assert one["error"] is None, one["error"]["traceback"]

    result = reload_lab(cases.way_of(sender_cases.SECOND_NAMES)).ours[sender_cases.SECOND_NAMES]
    (step,) = result["steps"]
    assert step["error"] is None, step["error"]["traceback"]
    assert differences(step["snapshot"], result["before"]) == []


@pytest.mark.engine
@pytest.mark.jobs(sender_cases.TIED_IN_CALLS)
def test_a_second_name_may_come_in_a_call_of_its_own(reload_lab: Labs) -> None:
    lab = reload_lab(cases.way_of(sender_cases.TIED_IN_CALLS))
    (step,) = lab.ours[sender_cases.TIED_IN_CALLS]["steps"]
    renewed(step, lab, "llama-tied")


@pytest.mark.engine
@pytest.mark.jobs(sender_cases.SAVED_MEANWHILE)
def test_a_mixture_of_old_and_new_is_not_saved(reload_lab: Labs) -> None:
    lab = reload_lab(cases.way_of(sender_cases.SAVED_MEANWHILE))
    refused, finished = lab.ours[sender_cases.SAVED_MEANWHILE]["steps"]
    assert refused["error"]["type"] == "ReloadBusyError"
    assert not list(Path(lab.root / lab.way / cases.MIXTURE).iterdir())
    renewed(finished, lab, "llama")


@pytest.mark.engine
@pytest.mark.parametrize("job", sender_cases.DEFAULT_SCALES)
def test_scales_go_back_to_those_that_were_saved_by_default(reload_lab: Labs, job: str) -> None:
    result = reload_lab(cases.way_of(job)).ours[job]
    (step,) = result["steps"]
    assert step["error"] is None, step["error"]["traceback"]
    assert differences(step["snapshot"], result["before"]) == []


def test_memory_that_is_held_is_known_by_its_range() -> None:
    held = {"a", "b"}
    memory = SenderMemory(held.__contains__)
    room = torch.zeros(100, dtype=torch.float32)
    memory.take("a", room[:10])
    memory.take("b", room[20:40].view(4, 5).t())
    memory.take("between", room[10:20])
    memory.take("after", room[40:])
    memory.take("nothing", room[:0])
    memory.take("between again", room[10:20])  # the first is not held any more
    for tensor, other in ((room[:1], "a"), (room[39:41], "b"), (room[15:35], "b"), (room, "a")):
        with pytest.raises(ReloadSourceError, match=f"memory that {other} came in"):
            memory.take("late", tensor)
    held.clear()
    memory.take("late", room)
    held.add("late")
    with pytest.raises(ReloadSourceError, match="memory that late came in"):
        memory.take("later", room[50:51])
    memory.forget()
    memory.take("later", room[50:51])
