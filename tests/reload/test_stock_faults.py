"""The faults of stock's reload that issue 4 lists: first that stock has them, then that they are gone."""

from collections.abc import Callable
from typing import Any

import pytest

from tests.reload import cases
from tests.reload.lab import EXACT, ReloadLab
from tests.reload.verdicts import renewed, unharmed
from tests.support.snapshot import differences

pytestmark = pytest.mark.engine

Labs = Callable[[str], ReloadLab]
ATTENTION = "model.layers.1.self_attn.attn"


def _both(labs: Labs, job: str) -> tuple[dict[str, Any], dict[str, Any], ReloadLab]:
    lab = labs(cases.way_of(job))
    stock, ours = lab.stock[job], lab.ours[job]
    assert stock["error"] is None, stock["error"]
    assert ours["error"] is None, ours["error"]
    return stock, ours, lab


def _scale(snapshot: dict[str, Any], kind: str) -> float:
    return float.fromhex(snapshot["numbers"][f"{ATTENTION}._{kind}_scale_float"])


@pytest.mark.jobs(cases.IDENTICAL)
def test_1_the_identical_checkpoint_changes_nothing(reload_lab: Labs) -> None:
    stock, ours, _ = _both(reload_lab, cases.IDENTICAL)
    assert differences(stock["steps"][0]["snapshot"], stock["before"]) != []
    assert ours["steps"][0]["error"] is None
    assert differences(ours["steps"][0]["snapshot"], ours["before"]) == []
    exact = torch_float(EXACT)
    assert [_scale(ours["before"], kind) for kind in ("q", "k", "v")] == [exact] * 3


def torch_float(value: float) -> float:
    """`value` as float32 holds it."""
    import struct

    return struct.unpack("f", struct.pack("f", value))[0]


@pytest.mark.jobs(cases.PER_HEAD)
def test_2_scales_per_head(reload_lab: Labs) -> None:
    stock, ours, lab = _both(reload_lab, cases.PER_HEAD)
    assert "functools.partial" in stock["steps"][0]["error"]["message"]
    assert stock["steps"][0]["meta"]
    renewed(ours["steps"][0], lab, "llama-kv-head")


@pytest.mark.jobs(cases.INT8)
def test_3_int8(reload_lab: Labs) -> None:
    stock, ours, lab = _both(reload_lab, cases.INT8)
    (step,) = stock["steps"]
    assert step["error"] is None
    fresh = lab.stock["fresh.llama-w8a8"]["before"]
    assert any("kernels: model.layers" in x for x in differences(step["snapshot"], fresh))
    renewed(ours["steps"][0], lab, "llama-w8a8")


@pytest.mark.jobs(cases.PART)
def test_4_a_part_of_a_fused_layer(reload_lab: Labs) -> None:
    stock, ours, lab = _both(reload_lab, cases.PART)
    assert stock["steps"][0]["error"] is None
    weight = "model.layers.0.self_attn.qkv_proj.weight"
    assert stock["steps"][0]["snapshot"]["tensors"][weight] != stock["before"]["tensors"][weight]
    failed, good = ours["steps"]
    unharmed(failed, ours["before"])
    assert failed["error"]["type"] == "ReloadIncompleteError"
    for name in ("k_proj", "v_proj"):
        assert f"model.layers.0.self_attn.{name}.weight" in failed["error"]["message"]
    assert "q_proj" not in failed["error"]["message"]
    renewed(good, lab, "llama")


@pytest.mark.jobs(cases.PART_QUANTIZED)
def test_4_a_quantized_model_without_one_projection(reload_lab: Labs) -> None:
    stock, ours, lab = _both(reload_lab, cases.PART_QUANTIZED)
    assert stock["steps"][0]["error"] is None
    failed, good = ours["steps"]
    unharmed(failed, ours["before"])
    assert "model.layers.0.self_attn.v_proj.weight_packed" in failed["error"]["message"]
    renewed(good, lab, "llama-w4a16")


@pytest.mark.jobs(cases.V_ONLY)
def test_5_v_scale_alone(reload_lab: Labs) -> None:
    stock, ours, lab = _both(reload_lab, cases.V_ONLY)
    assert all(step["error"] for step in stock["steps"])
    alone, good = ours["steps"]
    assert alone["error"] is None, alone["error"]["traceback"]
    fresh = lab.stock["fresh.llama-fp8-kv-only"]["before"]
    assert _scale(alone["snapshot"], "v") == _scale(fresh, "v")
    for kind in ("q", "k"):
        assert _scale(alone["snapshot"], kind) == _scale(ours["before"], kind)
    renewed(good, lab, "llama-fp8-kv-only")


@pytest.mark.jobs(cases.K_ONLY)
def test_5_k_scale_alone_with_compressed_tensors(reload_lab: Labs) -> None:
    stock, ours, lab = _both(reload_lab, cases.K_ONLY)
    assert _scale(stock["steps"][0]["snapshot"], "v") == 1.0 != _scale(stock["before"], "v")
    alone, good = ours["steps"]
    assert alone["error"] is None, alone["error"]["traceback"]
    fresh = lab.stock["fresh.llama-kv"]["before"]
    assert _scale(alone["snapshot"], "k") == _scale(fresh, "k")
    for kind in ("q", "v"):
        assert _scale(alone["snapshot"], kind) == _scale(ours["before"], kind)
    renewed(good, lab, "llama-kv")


@pytest.mark.jobs(cases.HALFWAY)
def test_6_an_iterator_that_raises_halfway(reload_lab: Labs) -> None:
    stock, ours, lab = _both(reload_lab, cases.HALFWAY)
    assert stock["steps"][0]["meta"]
    failed, good = ours["steps"]
    unharmed(failed, ours["before"])
    renewed(good, lab, "llama")


@pytest.mark.jobs(cases.HAND_SET)
def test_7_scales_set_by_hand_stay(reload_lab: Labs) -> None:
    stock, ours, lab = _both(reload_lab, cases.HAND_SET)
    assert _scale(stock["steps"][0]["snapshot"], "k") == 1.0 != _scale(stock["before"], "k")
    renewed(ours["steps"][0], lab, "llama-hand-set")


@pytest.mark.jobs(cases.UNQUANTIZED_SCALE)
def test_7_a_model_without_kv_quantization_takes_scales(reload_lab: Labs) -> None:
    stock, ours, _ = _both(reload_lab, cases.UNQUANTIZED_SCALE)
    assert stock["steps"][0]["error"] is not None
    (step,) = ours["steps"]
    assert step["error"] is None, step["error"]["traceback"]
    changed = [line.split(" is ")[0] for line in differences(step["snapshot"], ours["before"])]
    assert changed == [
        f"tensors: {ATTENTION}._k_scale",
        f"tensors: {ATTENTION}._k_scale_cpu",
        f"numbers: {ATTENTION}._k_scale_float",
    ]
    assert _scale(step["snapshot"], "k") == 0.375


@pytest.mark.jobs(cases.DUMMY)
def test_8_random_scales_do_not_stay(reload_lab: Labs) -> None:
    """Weights alone, into a model that was filled at random: a cold load of them has scales of one."""
    stock, ours, lab = _both(reload_lab, cases.DUMMY)
    assert _scale(stock["steps"][0]["snapshot"], "k") != 1.0
    weights, good = ours["steps"]
    assert weights["error"] is None, weights["error"]["traceback"]
    assert [_scale(weights["snapshot"], kind) for kind in ("q", "k", "v")] == [1.0] * 3
    renewed(good, lab, "llama-kv")


@pytest.mark.jobs(cases.BUFFERS)
def test_10_kernel_format_reaches_kv_scales(reload_lab: Labs) -> None:
    stock, ours, lab = _both(reload_lab, cases.BUFFERS)
    assert stock["steps"][0]["error"] is not None
    (step,) = ours["steps"]
    assert step["error"] is None, step["error"]["traceback"]
    fresh = lab.stock["fresh.llama-kv"]["before"]  # which has each scale doubled, too
    for kind in ("q", "k", "v"):
        assert _scale(step["snapshot"], kind) == _scale(fresh, kind) != _scale(ours["before"], kind)
        path = f"{ATTENTION}._{kind}_scale"
        assert step["snapshot"]["tensors"][path] == fresh["tensors"][path]
    path = f"{ATTENTION}._k_scale_cpu"
    assert step["snapshot"]["tensors"][path] == fresh["tensors"][path]


@pytest.mark.jobs(cases.SCALES_ALONE)
def test_kv_scales_alone_are_an_update(reload_lab: Labs) -> None:
    lab = reload_lab(cases.way_of(cases.SCALES_ALONE))
    result = lab.ours[cases.SCALES_ALONE]
    (step,) = result["steps"]
    assert step["error"] is None, step["error"]["traceback"]
    assert step["moved"] == []
    fresh = lab.stock["fresh.llama-w8a8-kv"]["before"]
    scales = {k for k in fresh["tensors"] if ".attn._" in k and "_scale" in k}
    assert scales
    assert all(step["snapshot"]["tensors"][k] == fresh["tensors"][k] for k in scales)
    assert step["snapshot"]["numbers"] == fresh["numbers"]
    assert step["snapshot"]["kernels"] == result["before"]["kernels"]
