"""A real engine takes new weights and scales, and then says what one started from them says."""

from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from tests.reload.checkpoints import updated
from tests.support.engine import Spec, run_engine
from tests.support.lab import WITH_OURS, without_ours
from tests.zoo.checkpoint import Checkpoint
from tests.zoo.kinds import KINDS, PACKED

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
