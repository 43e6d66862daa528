"""On a CUDA device: what comes back is what was saved. Written with care, and never run so far."""

import json
from pathlib import Path

import pytest
import torch

from tests.support.engine import Spec, run_engine
from tests.support.engine_lab import explain
from tests.support.lab import WITH_OURS, Zoo, without_ours
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
