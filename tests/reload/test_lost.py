"""After `sleep(level=2)` a model has to be sent whole. The CPU can't sleep: parameters are made NaN."""

from collections.abc import Callable

import pytest

from tests.reload import cases
from tests.reload.lab import ReloadLab
from tests.support.snapshot import differences

pytestmark = pytest.mark.engine

Labs = Callable[[str], ReloadLab]
GONE = "sleep(level=2) threw"


@pytest.mark.jobs(cases.LOST)
def test_nothing_but_a_whole_model_will_do(reload_lab: Labs) -> None:
    lab = reload_lab(cases.way_of(cases.LOST))
    result, fresh = lab.ours[cases.LOST], lab.stock["fresh.llama-kv"]["before"]
    assert result["error"] is None, result["error"]
    part, scales, kernel_format, half, whole, after = result["steps"]
    for step, missing in (
        (part, "model.layers.0.input_layernorm.weight"),
        (scales, "model.embed_tokens.weight"),
        (kernel_format, "model.embed_tokens.weight"),
    ):
        assert step["error"]["type"] == "ReloadIncompleteError"
        assert missing in step["error"]["message"]
        assert "there is nothing to generate with" in step["error"]["message"]
    assert half["error"]["type"] == "ReloadSourceError"
    assert "there is nothing to generate with" in half["error"]["message"]
    assert whole["error"] is None, whole["error"]["traceback"]
    assert whole["moved"] == []
    assert differences(whole["snapshot"], fresh) == []
    assert "The engine holds the weights it had before" in after["error"]["message"]
    assert differences(after["snapshot"], fresh) == []


@pytest.mark.jobs(cases.LOST_BUT_ONE)
def test_what_upstream_saved_need_not_be_sent(reload_lab: Labs) -> None:
    lab = reload_lab(cases.way_of(cases.LOST_BUT_ONE))
    result, fresh = lab.ours[cases.LOST_BUT_ONE], lab.stock["fresh.llama-kv"]["before"]
    (step,) = result["steps"]
    assert step["error"] is None, step["error"]["traceback"]
    old, new = result["before"]["tensors"][cases.PRESERVED], fresh["tensors"][cases.PRESERVED]
    assert step["snapshot"]["tensors"][cases.PRESERVED] == old != new
    others = step["snapshot"]["tensors"] | {cases.PRESERVED: new}
    assert others == fresh["tensors"]
