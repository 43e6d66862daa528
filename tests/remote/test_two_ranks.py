"""Two ranks of tensor parallelism, in two processes, start from one hub and share its cache."""

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.remote import hub as hubs
from tests.support.lab import WITH_OURS, Zoo
from tests.support.model_level import environment
from tests.support.process import ROOT
from tests.zoo.kinds import PACKED

pytestmark = [pytest.mark.engine, pytest.mark.full]

KIND = "llama-kv-head"


def run(ranks: Path, zoo: Zoo, directory: Path, repo: str, **env: str) -> list[dict[str, Any]]:
    """What each rank says of itself; see `two_ranks.py`."""
    processes = []
    for rank in (0, 1):
        job = {
            "rank": rank,
            "world": str(ranks / "world"),
            "source": str(zoo.path(KIND)),
            "save": str(directory),
            "repo": repo,
            "result": str(ranks / f"{rank}.json"),
        }
        processes.append(
            subprocess.Popen(
                [sys.executable, "-m", "tests.remote.two_ranks", json.dumps(job)],
                cwd=ROOT,
                env=environment(PACKED, WITH_OURS) | env | {"HF_TOKEN": f"hf_rank{rank}"},
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                text=True,
            )
        )
    said = [process.communicate(timeout=300)[0] for process in processes]
    for process, text in zip(processes, said, strict=True):
        assert process.returncode == 0, text
    return [json.loads((ranks / f"{rank}.json").read_text()) for rank in (0, 1)]


def test_each_of_two_ranks_gets_its_own_files(zoo: Zoo, tmp_path: Path) -> None:
    saved = tmp_path / "saved"
    with hubs.serving() as hub:
        hub.publish("org/ranks", saved)  # served as soon as it is saved
        results = run(
            tmp_path,
            zoo,
            saved,
            "org/ranks",
            HF_ENDPOINT=hub.endpoint,
            HF_HOME=str(tmp_path / "hf"),
            HF_HUB_OFFLINE="0",
            VLLM_DIST_IDENT=f"vss{os.getpid()}",  # what an engine tells its workers
        )
        parts = {p.name for p in saved.glob("*.safetensors")}
        own = [{name for name in parts if f"-rank-{rank}-" in name} for rank in (0, 1)]
        assert all(own)
        for rank in (0, 1):
            sent = {n for n in hub.fetched(f"hf_rank{rank}") if n.endswith(".safetensors")}
            assert sent == own[rank]
    assert results[0]["saved"] != results[1]["saved"]
    for result in results:
        assert result["loaded"] == result["saved"]
