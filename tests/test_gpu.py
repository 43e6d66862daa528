"""On a CUDA device: what comes back is what was saved. Written with care, and never run so far."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.reload.checkpoints import updated
from tests.reload.script import Script, run_scripts
from tests.support.engine import Spec, run_engine
from tests.support.engine_lab import explain
from tests.support.lab import WITH_OURS, Zoo, without_ours
from tests.zoo.checkpoint import Checkpoint
from tests.zoo.kinds import KINDS, PACKED

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]

#: Kinds whose tensors a CUDA build transposes, repacks, or reads FP8 scales from.
CUDA_KINDS = ["llama", "llama-kv", "llama-w8a8-kv", "llama-w4a16", "llama-fp8-static-kv", "mixtral"]


def _tensors(directory: Path) -> dict[str, tuple[str, str]]:
    """Stage and checksum of each tensor, by path, as the manifest lists them."""
    (rank,) = json.loads((directory / "sharded_state.json").read_text())["ranks"]
    return {path: (entry["stage"], entry["checksum"]) for path, entry in rank["tensors"].items()}


@pytest.mark.parametrize("layout", ["auto", "source"])
@pytest.mark.parametrize("kind", CUDA_KINDS)
def test_an_engine_comes_back(zoo: Zoo, tmp_path: Path, kind: str, layout: str) -> None:
    """Bytes: saved again from what was loaded, every tensor has its checksum. Outputs: as far as two
    starts of stock vLLM from the original checkpoint agree, so does the start from the saved state."""
    engine = dict(KINDS[kind].engine)
    original = Spec(str(zoo.path(kind)), engine)
    first, second = (run_engine(original, PACKED, without_ours(PACKED)) for _ in range(2))
    assert first["error"] is None, explain(first)

    saved, again = tmp_path / "saved", tmp_path / "again"
    spec = Spec(str(zoo.path(kind)), engine, save=str(saved), again=True)
    saving = run_engine(spec, PACKED, WITH_OURS, VSS_LAYOUT=layout)
    assert saving["error"] is None, explain(saving)

    spec = Spec(str(saved), engine | {"load_format": "sharded_state"}, save=str(again))
    loading = run_engine(spec, PACKED, WITH_OURS, VSS_LAYOUT=layout)
    assert loading["error"] is None, explain(loading)
    assert _tensors(again) == _tensors(saved)
    if first["outputs"] == second["outputs"]:
        assert saving["outputs"] == saving["again"] == first["outputs"]
        assert loading["outputs"] == first["outputs"]


def test_a_reload_after_sleep_level_2(zoo: Zoo, tmp_path: Path) -> None:
    """Weights are thrown away: a part of the model is refused, and all of it is as a fresh start."""
    kind = KINDS["llama-kv"]
    old, new = str(zoo.path("llama-kv")), updated(kind.build())
    part = {k: t for k, t in new.tensors.items() if "layers.1.input_layernorm" not in k}
    whole = str(new.write(tmp_path / "new"))
    broken = str(Checkpoint(new.config, part).write(tmp_path / "part"))
    engine = dict(kind.engine) | {"enable_sleep_mode": True}

    def call(method: str, **arguments: Any) -> tuple[str, dict[str, Any]]:
        return "call", {"method": method, **arguments}

    steps = [
        ("generate", {}),
        call("sleep", level=2),
        ("rpc", {"weights_path": whole}),
        call("wake_up", tags=["weights"]),
        ("rpc", {"weights_path": broken}),
        ("rpc", {"weights_path": whole}),
        call("wake_up"),
        ("generate", {}),
    ]
    made = run_scripts(
        PACKED,
        {
            "ours": Script(old, engine, steps),
            "stock": Script(whole, engine, steps[:1]),
            "stock again": Script(whole, engine, steps[:1]),
        },
    )
    asleep, missing, good = (made["ours"][number]["error"] for number in (2, 4, 5))
    assert asleep["type"] == "ReloadAsleepError"
    assert "model.layers.1.input_layernorm.weight" in missing["message"]
    assert "there is nothing to generate with" in missing["message"]
    assert good is None
    assert all(made["ours"][number]["error"] is None for number in (1, 3, 6))
    if made["stock"] == made["stock again"]:
        assert made["ours"][-1] == made["stock"][0]
