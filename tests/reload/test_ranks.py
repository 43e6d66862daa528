"""Two tensor-parallel ranks: when one can't take the new weights, neither does; each takes its own."""

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.reload.checkpoints import updated
from tests.support.lab import WITH_OURS
from tests.support.model_level import environment
from tests.support.process import ROOT
from tests.support.snapshot import differences
from tests.zoo.kinds import KINDS, PACKED
from vllm_sharded_state import digest

pytestmark = pytest.mark.engine


_EXPERTS = {"enable_expert_parallel": True}


@pytest.mark.parametrize(
    ("name", "engine", "bad", "error"),
    [
        ("llama-kv-head", {}, "model.layers.1.self_attn.v_scale", "ReloadScaleError"),
        # Each rank holds other experts, by an expert map.
        ("mixtral", _EXPERTS, "model.layers.1.input_layernorm.weight", "ReloadMismatchError"),
        ("qwen3-moe", _EXPERTS, "model.layers.1.mlp.gate.weight", "ReloadMismatchError"),
    ],
)
def test_a_rank_that_fails_while_the_other_succeeds(
    tmp_path: Path, name: str, engine: dict[str, Any], bad: str, error: str
) -> None:
    kind = KINDS[name]
    old, new = kind.build().write(tmp_path / "old"), updated(kind.build()).write(tmp_path / "new")
    settings = json.dumps(dict(kind.engine) | engine)
    common = [str(tmp_path / "meeting"), str(old), str(new), settings, bad]
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
    assert f"rank 1: {error}: {bad}" in ranks[0]["error"]
    assert ranks[1]["error"].startswith(error)
    for rank in ranks:
        assert differences(rank["after"], rank["before"]) == []
        assert isinstance(rank["report"], dict), rank["report"]
        assert differences(rank["second"], rank["fresh"]) == []
        assert differences(rank["fresh"], rank["before"]) != []
    assert differences(ranks[0]["fresh"], ranks[1]["fresh"]) != []

    sent = digest(updated(kind.build()).tensors.items())
    reports = [rank["report"] for rank in ranks]
    for rank, report in zip(ranks, reports, strict=True):
        assert report["sent"] == sent
        assert report["state"] == rank["digest"]["state"]
    assert reports[0]["state"] != reports[1]["state"]
    assert reports[0]["changed"] == reports[1]["changed"]

    # In calls: rank 1 never comes to the end, and rank 0 does not wait for it (two minutes, by default).
    assert ranks[0]["seconds"] < 60
    assert ranks[1]["update error"].startswith(error)
    assert ranks[0]["update error"].startswith("ReloadPeerError")
    assert f"rank 1: {error}: {bad}" in ranks[0]["update error"]
    # It comes too late: rank 0 has given up, so rank 1 does too.
    assert ranks[1]["late start"] is None
    for rank in ranks:
        assert differences(rank["update"], rank["fresh"]) == []
        assert rank["late error"].startswith("ReloadPeerError")
        assert "rank 0: waited 1 s for the other ranks" in rank["late error"]
        assert differences(rank["late"], rank["fresh"]) == []
        assert isinstance(rank["last report"], dict), rank["last report"]
        assert rank["last report"]["sent"] == digest(kind.build().tensors.items())
        assert differences(rank["last"], rank["before"]) == []

    if not engine:  # sharded state
        for rank in ranks:
            assert differences(rank["damaged"], rank["fresh"]) == []
            assert isinstance(rank["saved report"], dict), rank["saved report"]
            assert differences(rank["saved"], rank["before"]) == []
        assert ranks[0]["damaged error"].startswith("ReloadPeerError")
        assert "rank 1: IncompleteError" in ranks[0]["damaged error"]
        assert ranks[1]["damaged error"].startswith("IncompleteError")
