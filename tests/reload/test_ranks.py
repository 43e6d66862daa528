"""Two tensor-parallel ranks: when one can't take the new weights, neither does."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.reload.checkpoints import updated
from tests.support.lab import WITH_OURS
from tests.support.model_level import environment
from tests.support.process import ROOT
from tests.support.snapshot import differences
from tests.zoo.kinds import KINDS, PACKED

pytestmark = pytest.mark.engine


def test_a_rank_that_fails_while_the_other_succeeds(tmp_path: Path) -> None:
    kind = KINDS["llama-kv-head"]
    old, new = kind.build().write(tmp_path / "old"), updated(kind.build()).write(tmp_path / "new")
    common = [str(tmp_path / "meeting"), str(old), str(new)]
    processes = [
        subprocess.Popen(
            [sys.executable, "-m", "tests.reload.ranks", str(rank), *common, str(tmp_path / name)],
            cwd=ROOT,
            env=environment(PACKED, WITH_OURS) | {"VLLM_DIST_IDENT": f"vss{os.getpid()}"},
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        for rank, name in enumerate(("0.json", "1.json"))
    ]
    logs = [process.communicate(timeout=300)[0] for process in processes]
    for process, log in zip(processes, logs, strict=True):
        assert process.returncode == 0, log
    ranks = [json.loads((tmp_path / name).read_text()) for name in ("0.json", "1.json")]

    assert ranks[0]["error"].startswith("ReloadPeerError")
    assert "rank 1: ReloadScaleError: model.layers.1.self_attn.v_scale" in ranks[0]["error"]
    assert ranks[1]["error"].startswith("ReloadScaleError")
    for rank in ranks:
        assert differences(rank["after"], rank["before"]) == []
        assert rank["second error"] is None
        assert differences(rank["second"], rank["fresh"]) == []
        assert differences(rank["fresh"], rank["before"]) != []
    assert differences(ranks[0]["fresh"], ranks[1]["fresh"]) != []

    # In calls: rank 1 never comes to the end, and rank 0 does not wait for it (two minutes, by default).
    assert ranks[0]["seconds"] < 60
    assert ranks[1]["update error"].startswith("ReloadScaleError")
    assert ranks[0]["update error"].startswith("ReloadPeerError")
    assert "rank 1: ReloadScaleError: model.layers.1.self_attn.v_scale" in ranks[0]["update error"]
    # It comes too late: rank 0 has given up, so rank 1 does too.
    assert ranks[1]["late start"] is None
    for rank in ranks:
        assert differences(rank["update"], rank["fresh"]) == []
        assert rank["late error"].startswith("ReloadPeerError")
        assert "rank 0: waited 1 s for the other ranks" in rank["late error"]
        assert differences(rank["late"], rank["fresh"]) == []
        assert rank["last error"] is None
        assert differences(rank["last"], rank["before"]) == []
