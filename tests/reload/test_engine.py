"""A real engine takes new weights and scales, and then says what one started from them says."""

from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from tests.reload.checkpoints import updated
from tests.support.engine import Spec, run_engine
from tests.support.lab import WITH_OURS, without_ours
from tests.zoo.checkpoint import Checkpoint
from tests.zoo.kinds import KINDS, PACKED
from vllm_sharded_state import digest

pytestmark = pytest.mark.engine


def test_an_engine_takes_new_weights_or_keeps_its_own(tmp_path: Path) -> None:
    kind = KINDS["llama-kv-head"]
    old, new = kind.build().write(tmp_path / "old"), updated(kind.build()).write(tmp_path / "new")
    part = updated(kind.build())
    kept = {k: v for k, v in part.tensors.items() if "layers.1.mlp.up_proj" not in k}
    Checkpoint(part.config, kept).write(tmp_path / "part")
    engine = dict(kind.engine)
    paths = [str(tmp_path / name) for name in ("part", "nowhere", "new")]
    with ThreadPoolExecutor(2) as pool:  # two processes, side by side
        ours = pool.submit(run_engine, Spec(str(old), engine, reload=paths), PACKED, WITH_OURS)
        stock = pool.submit(run_engine, Spec(str(new), engine), PACKED, without_ours(PACKED))
        result, fresh = ours.result(), stock.result()
    assert result["error"] is None, result["error"]["traceback"]
    assert fresh["error"] is None, fresh["error"]["traceback"]

    incomplete, missing, good = result["reloads"]
    assert "model.layers.1.mlp.up_proj.weight" in incomplete["error"]["message"]
    assert "There is no directory" in missing["error"]["message"]
    assert incomplete["outputs"] == missing["outputs"] == result["outputs"] != fresh["outputs"]
    assert good["error"] is None
    assert good["outputs"] == fresh["outputs"]


def test_a_call_over_processes_takes_our_arguments_and_answers(tmp_path: Path) -> None:
    """Nothing but what msgpack can carry goes to the engine's process and comes back."""
    kind = KINDS["llama-kv-head"]
    checkpoint = updated(kind.build())
    old, new = kind.build().write(tmp_path / "old"), checkpoint.write(tmp_path / "new")
    kept = {k: v for k, v in checkpoint.tensors.items() if "layers.1.mlp.up_proj" not in k}
    part = {"weights_path": str(Checkpoint(checkpoint.config, kept).write(tmp_path / "part"))}
    whole = {"weights_path": str(new), "digest": True}
    calls = [part | {"atomik": "layer"}, part | {"atomic": "layer"}, whole]
    specs = [
        Spec(str(old), dict(kind.engine), reload=calls, digest=True),
        Spec(str(new), dict(kind.engine), digest=True),
    ]
    alone = {"VLLM_ENABLE_V1_MULTIPROCESSING": "1", "VLLM_ALLOW_INSECURE_SERIALIZATION": "0"}
    with ThreadPoolExecutor(2) as pool:
        result, fresh = pool.map(lambda spec: run_engine(spec, PACKED, WITH_OURS, **alone), specs)
    for engine in (result, fresh):
        assert engine["error"] is None, engine["error"]["traceback"]

    unknown, by_layer, good = result["reloads"]
    assert "reload_weights has no argument atomik" in unknown["error"]["message"]
    assert unknown["outputs"] == result["outputs"]
    assert "These units hold new weights" in by_layer["error"]["message"]
    assert by_layer["outputs"] != result["outputs"]
    assert good["error"] is None, good["error"]
    assert good["outputs"] == fresh["outputs"]
    (report,) = good["report"]
    assert report["sent"] == digest(checkpoint.tensors.items())
    assert [{k: report[k] for k in ("state", "uncovered")}] == result["digest"] == fresh["digest"]
    assert report["changed_bytes"] > 0 == report["untouched_bytes"]
