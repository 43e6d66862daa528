"""Real engines: greedy tokens, logprobs and every tensor are those of the original, bit for bit."""

import pytest

from tests.support.engine_lab import EngineLab, explain
from tests.support.snapshot import differences
from tests.zoo.kinds import PACKED, REFERENCE, ROUND_TRIPS, TENSORS

pytestmark = pytest.mark.engine

#: Between them every way, every layout and every kind of state. The rest is the full matrix.
CHOSEN = [
    ("llama-kv-head", PACKED, "auto"),  # scales per head; consumed linears; a captured head
    ("llama-w8a8-kv", PACKED, "auto"),  # int8 packed by its kernel, weights set to None
    ("llama-w4a16", PACKED, "auto"),  # repacked to another shape under the same name
    ("llama-lora", PACKED, "auto"),  # vocabulary padding, wrapped modules
    ("mixtral", PACKED, "auto"),  # experts prepacked
    ("deepseek-v2", PACKED, "auto"),  # latent attention: matrices absorbed into plain attributes
    ("bert", PACKED, "auto"),  # pooling
    ("llama-kv-head", TENSORS, "runtime"),
    ("llama-hand-set", TENSORS, "runtime"),  # scales that no checkpoint holds
    ("llama-tied", TENSORS, "source"),
    ("llama-fp8-static-kv", REFERENCE, "runtime"),  # transposed FP8 weights, as on a GPU
    ("llama-fp8-static-kv", REFERENCE, "source"),
]
PAIRS = [
    pytest.param(*pair, marks=() if pair in CHOSEN else pytest.mark.full) for pair in ROUND_TRIPS
]


def test_the_chosen_pairs_are_part_of_the_matrix() -> None:
    assert set(CHOSEN) <= set(ROUND_TRIPS)


@pytest.mark.parametrize(("kind", "way", "layout"), PAIRS)
def test_an_engine_comes_back(engines: EngineLab, kind: str, way: str, layout: str) -> None:
    reference = engines.reference(kind, way)
    assert reference["error"] is None, explain(reference)

    saving = engines.saving(kind, way, layout)
    assert saving["error"] is None, explain(saving)
    assert saving["outputs"] == reference["outputs"], "the plugin changed a cold start"
    assert saving["again"] == saving["outputs"], "saving changed the live engine"

    loading = engines.loading(kind, way, layout)
    assert loading["error"] is None, explain(loading)
    assert loading["outputs"] == reference["outputs"]
    assert differences(loading["snapshot"], reference["snapshot"]) == []


def test_prompts_bring_out_different_tokens(engines: EngineLab) -> None:
    """What the comparison rests on: outputs are no constant, and FP8 scales change them."""
    with_scales = engines.reference("llama-kv-head", PACKED)["outputs"]
    assert len({tuple(one["tokens"]) for one in with_scales}) == len(with_scales)
    assert all(len(set(one["tokens"])) > 3 for one in with_scales)
    assert with_scales != engines.reference("llama-w8a8-kv", PACKED)["outputs"]
