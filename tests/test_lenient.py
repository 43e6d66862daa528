"""`strict=false` tells of every tensor that is missing, of those too that a load makes by itself."""

from pathlib import Path

import pytest

from tests.support import edit
from tests.support.batch import run_batch
from tests.support.lab import WITH_OURS, Result, Zoo, explain, sharded
from tests.zoo.kinds import PACKED

pytestmark = pytest.mark.engine

KIND = "llama-hand-set"


@pytest.fixture(scope="module")
def loads(zoo: Zoo, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Result]:
    """A unit in source layout has a buffer that is put back after processing; its bytes are gone.

    The manifest still lists it. With `verify=off` nothing else tells that the file is another.
    """
    saved = tmp_path_factory.mktemp("lenient") / "saved"
    (save,) = run_batch(
        [zoo.job(KIND, save=str(saved), layout="source")], PACKED, WITH_OURS
    ).values()
    assert save["error"] is None, explain(save)
    key = lost(saved)
    edit.rewrite(edit.find(saved, key), lambda tensors: tensors.pop(key))
    jobs = []
    for strict in (True, False):
        job = sharded(KIND, saved, id=f"strict {strict}")
        job.engine["model_loader_extra_config"] = {"strict": strict, "verify": "off"}
        jobs.append(job)
    results = run_batch(jobs, PACKED, WITH_OURS)
    return {**results, "key": {"name": key}}


def lost(saved: Path) -> str:
    """The first tensor, by name, that is put back after processing."""
    tensors = edit.read_manifest(saved)["ranks"][0]["tensors"]
    return min(entry["key"] for entry in tensors.values() if entry["stage"] == "runtime")


def test_strict_refuses_it_by_name(loads: dict[str, Result]) -> None:
    error = loads["strict True"]["error"]
    assert error is not None
    assert "ShardedStateError" in error["bases"]
    assert loads["key"]["name"] in error["message"]


def test_otherwise_one_warning_names_it(loads: dict[str, Result]) -> None:
    result = loads["strict False"]
    assert result["error"] is None, explain(result)
    (said,) = [line for line in result["warnings"] if "strict is false" in line]
    name = loads["key"]["name"]
    assert f"{name}: as a load makes it" in said
    owner, _, buffer = name.rpartition(".")
    numbers = result["snapshot"]["numbers"]
    assert numbers[f"{owner}.{buffer}_float"] == (1.0).hex(), (
        "the scale's host mirror says the same"
    )
