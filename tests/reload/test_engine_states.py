"""Real engines in the states that a reload has to know of: compiled, with LoRA, with a draft model."""

import json
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
from safetensors.torch import save_file

from tests.reload.kinds import new
from tests.support.engine import Spec, run_engine
from tests.support.lab import WITH_OURS, without_ours
from tests.support.snapshot import differences
from tests.zoo import decoders
from tests.zoo.checkpoint import Checkpoint, noise
from tests.zoo.kinds import KINDS, PACKED, TENSORS

pytestmark = pytest.mark.engine

COMPILED: dict[str, Any] = {"enforce_eager": False}


def _run(runs: list[tuple[Spec, str]], way: str, **env: str) -> list[dict[str, Any]]:
    """Run engines, each a specification and plugins, two at a time."""
    with ThreadPoolExecutor(2) as pool:
        pending = [pool.submit(run_engine, spec, way, plugins, **env) for spec, plugins in runs]
        results = [one.result() for one in pending]
    for result in results:
        assert result["error"] is None, result["error"]["traceback"]
    return results


def _checkpoints(kind: str, root: Path) -> tuple[str, str]:
    return (
        str(KINDS[kind].build().write(root / "old")),
        str(new(kind).write(root / "new")),
    )


@pytest.mark.parametrize("way", [PACKED, TENSORS])
def test_a_compiled_engine_over_ten_reloads(tmp_path: Path, way: str) -> None:
    """No tensor moves, and what the compiled graph computes follows: in handles as in tensors."""
    old, latest = _checkpoints("llama-kv", tmp_path)
    engine = COMPILED | dict(KINDS["llama-kv"].engine)
    ours, fresh = _run(
        [
            (Spec(old, engine, reload=[latest, old] * 5), WITH_OURS),
            (Spec(latest, engine), without_ours(way)),
        ],
        way,
    )
    assert ours["outputs"] != fresh["outputs"]
    for number, step in enumerate(ours["reloads"]):
        assert step["error"] is None
        assert step["moved"] == []
        assert step["outputs"] == (ours if number % 2 else fresh)["outputs"]


def test_a_graph_into_which_weights_were_frozen(tmp_path: Path) -> None:
    """Stock says that it reloaded, and answers with old weights; here it is refused.

    With packed weights stock's next answer kills the process: the graph holds addresses of old handles.
    """
    old, latest = _checkpoints("llama", tmp_path)
    engine = COMPILED | {
        "compilation_config": {"inductor_compile_config": {"max_autotune": True}},
    }
    ours, stock, fresh = _run(
        [
            (Spec(old, engine, reload=[latest]), WITH_OURS),
            (Spec(old, engine, reload=[latest]), without_ours(TENSORS)),
            (Spec(latest, engine), without_ours(TENSORS)),
        ],
        TENSORS,
        VLLM_DISABLE_COMPILE_CACHE="1",
    )
    (silent,) = stock["reloads"]
    assert silent["error"] is None
    assert silent["outputs"] != fresh["outputs"]
    (refused,) = ours["reloads"]
    assert refused["error"]["type"] == "ReloadUnsupportedError"
    assert refused["outputs"] == ours["outputs"]


def _adapter(root: Path) -> str:
    rank, targets = 4, ("q_proj", "v_proj", "down_proj")
    weights = llama_weights()
    tensors = {}
    for name, (rows, columns) in weights.items():
        if name.endswith(targets):
            path = f"base_model.model.{name}"
            tensors[f"{path}.lora_A.weight"] = noise(f"{path}.a", rank, columns)
            tensors[f"{path}.lora_B.weight"] = noise(f"{path}.b", rows, rank, std=0.5)
    root.mkdir()
    save_file(tensors, root / "adapter_model.safetensors")
    config = {"peft_type": "LORA", "r": rank, "lora_alpha": 8, "target_modules": list(targets)}
    (root / "adapter_config.json").write_text(json.dumps(config))
    return str(root)


def llama_weights() -> dict[str, tuple[int, int]]:
    """Shapes of the linear layers' weights, by module."""
    return {
        name.removesuffix(".weight"): tuple(tensor.shape)
        for name, tensor in decoders.llama().tensors.items()
        if name.endswith("_proj.weight")
    }


def test_an_engine_with_an_adapter(tmp_path: Path) -> None:
    """The base model's weights are updated under its own names; the adapter works on the new ones."""
    old, latest = _checkpoints("llama-lora", tmp_path)
    adapter, engine = _adapter(tmp_path / "adapter"), dict(KINDS["llama-lora"].engine)
    ours, fresh, bare = _run(
        [
            (Spec(old, engine, reload=[latest], adapter=adapter), WITH_OURS),
            (Spec(latest, engine, adapter=adapter), without_ours(PACKED)),
            (Spec(latest, engine), without_ours(PACKED)),
        ],
        PACKED,
    )
    (step,) = ours["reloads"]
    assert step["error"] is None
    assert step["moved"] == []
    assert step["outputs"] == fresh["outputs"] != ours["outputs"]
    assert bare["outputs"] != fresh["outputs"], "the adapter changes nothing"


def _eagle() -> Checkpoint:
    """An EAGLE draft of one layer, without embeddings and head: it takes the target's."""
    target = decoders.llama()
    prefix = "model.layers.0."
    tensors = {
        f"layers.0.{name.removeprefix(prefix)}": tensor.flip(0).contiguous()
        for name, tensor in target.tensors.items()
        if name.startswith(prefix) and "input_layernorm" not in name
    }
    tensors["fc.weight"] = noise("fc", decoders.HIDDEN, 2 * decoders.HIDDEN)
    return Checkpoint(target.config | {"num_hidden_layers": 1}, tensors)


def test_a_draft_model_keeps_its_weights_and_follows_in_what_it_shares(tmp_path: Path) -> None:
    old, latest = _checkpoints("llama", tmp_path)
    draft = str(_eagle().write(tmp_path / "draft"))
    engine = {
        "speculative_config": {"model": draft, "method": "eagle", "num_speculative_tokens": 2}
    }
    ours, fresh = _run(
        [
            (Spec(old, engine, reload=[latest], draft=True), WITH_OURS),
            (Spec(latest, engine, draft=True), without_ours(PACKED)),
        ],
        PACKED,
    )
    (step,) = ours["reloads"]
    assert step["error"] is None
    assert step["moved"] == []
    assert step["outputs"] == fresh["outputs"] != ours["outputs"]
    shared = [name for name in fresh["draft"]["kernels"] if "embed_tokens" in name]
    assert shared
    assert differences(ours["draft"], fresh["draft"]) == []
