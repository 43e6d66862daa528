"""What a reload says it did, beside numbers counted by hand, and digests, beside a cold load's."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from tests.reload import cases
from tests.reload.lab import ReloadLab
from tests.zoo.decoders import HEAD_DIM, HEADS, HIDDEN, INTER, KV_HEADS, LAYERS
from vllm_sharded_state import digest

pytestmark = pytest.mark.engine

Labs = Callable[[str], ReloadLab]

#: Bytes of the weights of one Llama layer in bf16, by unit; embeddings have 256 rows, padded or not.
LAYER = {
    "self_attn.qkv_proj": 2 * (HEADS + 2 * KV_HEADS) * HEAD_DIM * HIDDEN,
    "self_attn.o_proj": 2 * HIDDEN * HEADS * HEAD_DIM,
    "mlp.gate_up_proj": 2 * 2 * INTER * HIDDEN,
    "mlp.down_proj": 2 * HIDDEN * INTER,
    "input_layernorm": 2 * HIDDEN,
    "post_attention_layernorm": 2 * HIDDEN,
}
LLAMA = {
    f"model.layers.{layer}.{unit}": size for layer in range(LAYERS) for unit, size in LAYER.items()
} | {
    "model.embed_tokens": 2 * 256 * HIDDEN,
    "model.norm": 2 * HIDDEN,
    "lm_head": 2 * 256 * HIDDEN,
}
ATTENTION = {f"model.layers.{layer}.self_attn.attn" for layer in range(LAYERS)}
HEX = 32


def tensors(directory: Path) -> dict[str, torch.Tensor]:
    return {k: t for file in directory.glob("*.safetensors") for k, t in load_file(file).items()}


def counted(report: dict[str, Any], **units: set[str]) -> None:
    """The report names just `units`, with the bytes that `LLAMA` gives them."""
    for what in ("changed", "unchanged", "untouched"):
        names = units.get(what, set())
        assert report[what] == sorted(names), what
        assert report[f"{what}_bytes"] == sum(LLAMA.get(name, 0) for name in names), what
    assert 0 < report["seconds"] < 60


@pytest.mark.parametrize(
    "job",
    [
        pytest.param(job, marks=() if default else pytest.mark.full)
        for job, default in cases.UPDATES
    ],
)
def test_digests_are_those_of_what_was_sent_and_of_a_cold_load(reload_lab: Labs, job: str) -> None:
    lab, kind = reload_lab(cases.way_of(job)), cases.kind_of(job)
    there, back = (step["report"] for step in lab.ours[job]["steps"])
    sent = tensors(lab.new(kind))
    assert there["sent"] == digest(sorted(sent.items(), reverse=True))
    fresh = lab.stock[f"fresh.{kind}"]["digest"]
    assert there["uncovered"] == fresh["uncovered"] == []
    assert there["state"] == fresh["state"]
    assert there["changed"] != []
    assert not {"sent", "state", "uncovered"} & back.keys()


@pytest.mark.jobs("update llama-tied packed")
def test_of_tied_layers_both_change_and_bytes_count_once(reload_lab: Labs) -> None:
    step, _ = reload_lab("packed").ours["update llama-tied packed"]["steps"]
    assert step["report"]["changed"] == sorted(LLAMA)
    assert step["report"]["changed_bytes"] == sum(LLAMA.values()) - LLAMA["lm_head"]


@pytest.mark.jobs(cases.SAME)
def test_what_is_sent_as_it_was_is_unchanged(reload_lab: Labs) -> None:
    result = reload_lab(cases.way_of(cases.SAME)).ours[cases.SAME]
    (step,) = result["steps"]
    counted(step["report"], unchanged=set(LLAMA))
    assert step["report"]["state"] == result["digest"]["state"]


@pytest.mark.jobs(cases.SAME_PACKED)
def test_what_native_code_packs_counts_as_changed(reload_lab: Labs) -> None:
    result = reload_lab(cases.way_of(cases.SAME_PACKED)).ours[cases.SAME_PACKED]
    (step,) = result["steps"]
    packed = {name for name in LLAMA if not name.endswith("norm")}
    assert set(step["report"]["changed"]) == packed
    assert set(step["report"]["unchanged"]) == (LLAMA.keys() - packed) | ATTENTION
    assert step["report"]["untouched"] == []
    assert step["report"]["state"] == result["digest"]["state"]


@pytest.mark.jobs(cases.ONE_NORM)
def test_one_tensor_that_differs(reload_lab: Labs) -> None:
    result = reload_lab(cases.way_of(cases.ONE_NORM)).ours[cases.ONE_NORM]
    other, back = result["steps"]
    norm = {"model.layers.1.input_layernorm"}
    for step in (other, back):
        counted(step["report"], changed=norm, unchanged=LLAMA.keys() - norm)
    assert other["report"]["state"] != result["digest"]["state"]
    assert "state" not in back["report"]


@pytest.mark.jobs(cases.ONE_PACKED)
def test_packed_weights_are_in_the_digest(reload_lab: Labs) -> None:
    result = reload_lab(cases.way_of(cases.ONE_PACKED)).ours[cases.ONE_PACKED]
    (step,) = result["steps"]
    layer = "model.layers.1.mlp.down_proj"
    assert step["report"]["changed"] == [layer]
    assert set(step["report"]["untouched"]) == (LLAMA.keys() - {layer}) | ATTENTION
    assert step["report"]["state"] != result["digest"]["state"]
    assert result["digest"]["uncovered"] == []


@pytest.mark.jobs(cases.ONE_LAYER)
def test_layers_that_were_not_sent_are_untouched(reload_lab: Labs) -> None:
    (step,) = reload_lab(cases.way_of(cases.ONE_LAYER)).ours[cases.ONE_LAYER]["steps"]
    layer = {"model.layers.1.mlp.gate_up_proj"}
    counted(step["report"], changed=layer, untouched=LLAMA.keys() - layer)


@pytest.mark.jobs(cases.SCALES_ALONE)
def test_scales_alone_change_attention_layers_alone(reload_lab: Labs) -> None:
    (step,) = reload_lab(cases.way_of(cases.SCALES_ALONE)).ours[cases.SCALES_ALONE]["steps"]
    assert set(step["report"]["changed"]) == ATTENTION
    assert step["report"]["unchanged"] == []
    assert set(step["report"]["untouched"]) == LLAMA.keys()


@pytest.mark.jobs(cases.SAME_KERNEL_FORMAT)
def test_kernel_format_tells_the_same(reload_lab: Labs) -> None:
    (step,) = reload_lab(cases.way_of(cases.SAME_KERNEL_FORMAT)).ours[cases.SAME_KERNEL_FORMAT][
        "steps"
    ]
    norms = {name for name in LLAMA if name.endswith("norm")}
    assert set(step["report"]["unchanged"]) == norms
    assert step["report"]["unchanged_bytes"] == sum(LLAMA[name] for name in norms)
    assert step["report"]["changed"] == []
    assert set(step["report"]["untouched"]) >= LLAMA.keys() - norms


@pytest.mark.parametrize("job", cases.BLIND)
def test_nothing_changes_unseen_by_the_digest(reload_lab: Labs, job: str) -> None:
    result = reload_lab(cases.way_of(job)).ours[job]
    assert result["error"] is None, result["error"]
    assert result["blind"]["tried"] > 20
    assert result["blind"]["unseen"] == []
