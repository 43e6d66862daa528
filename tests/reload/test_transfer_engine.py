"""Weights through vLLM's workers and a weight-transfer engine, on two ranks."""

from pathlib import Path

import pytest

from tests.reload.checkpoints import updated
from tests.reload.update_engine import Given
from tests.support.lab import WITH_OURS, without_ours
from tests.support.process import run_whole
from tests.zoo.kinds import KINDS, PACKED

pytestmark = pytest.mark.engine


def test_an_update_is_taken_on_both_ranks_or_on_none(tmp_path: Path) -> None:
    kind = KINDS["llama-kv-head"]
    old = kind.build().write(tmp_path / "old")
    new = updated(kind.build()).write(tmp_path / "new", files=1)
    environment = {"VLLM_ENABLE_V1_MULTIPROCESSING": "1", "VLLM_CPU_OMP_THREADS_BIND": "0|1"}

    def run(plugins: str, model: Path, sent: str | None) -> dict:
        given = Given(str(model), dict(kind.engine), sent)
        module = "tests.reload.update_engine"
        (result,), _ = run_whole(module, [given], PACKED, plugins, 300, environment)
        return result

    result, fresh = run(WITH_OURS, old, str(new)), run(without_ours(PACKED), new, None)
    assert "the trainer went away" in result["broken"]
    assert result["after broken"] == result["old"] != fresh["old"]
    assert "The engine holds the weights it had before" in result["finished broken"]
    assert "Layers were sent in part" in result["finished early"]
    assert result["after early"] == result["old"]
    assert result["between"] != result["old"]  # an engine that runs, with some layers new
    assert result["new"] == fresh["old"]
