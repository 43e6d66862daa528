"""A save that can't be completed says so and leaves nothing that looks complete."""

import json
import shutil
from pathlib import Path

import pytest

from tests.support import edit
from tests.support.batch import run_batch
from tests.support.lab import WITH_OURS, Result, Zoo, explain, sharded
from tests.support.snapshot import differences
from tests.zoo.decoders import llama
from tests.zoo.kinds import PACKED, TENSORS

pytestmark = pytest.mark.engine

KIND = "llama"
WAYS = [(PACKED, "auto"), (TENSORS, "runtime"), (TENSORS, "source")]
#: One tensor a part, nearly: embeddings and attention fit, the MLP's first weight is larger.
PART = 66_000
#: What that weight is larger than, and the others are not.
LIMIT = 90_000


class Faults:
    """Saves that fail, the same save afterwards without the fault, and loads of what was left."""

    def __init__(self, way: str, layout: str, zoo: Zoo, root: Path) -> None:
        self.root = root
        (root / "file").write_text("not a directory")
        # Other weights of the same shapes, which a mixture of parts could pass for.
        other = llama(vocab=250, seed=1).write(root / "other")

        def save(name: str, directory: str, **more: object):  # type: ignore[no-untyped-def]
            return zoo.job(KIND, id=name, save=str(root / directory), layout=layout, **more)

        self.saves = run_batch(
            [
                save("no directory", "file"),
                save("below a file", "file/below"),
                save("full", "full", file_limit=64 * 1024),
                save("full later", "later", max_size=PART, file_limit=LIMIT),
                save("complete", "over", max_size=PART),
                save("over it, full", "over", model=str(other), max_size=PART, file_limit=LIMIT),
                save("well", "well"),
            ],
            way,
            WITH_OURS,
        )
        self._kill_in_the_last_step(root / "over", root / "half")
        shutil.copytree(root / "half", root / "waiting")
        side_files = next((root / "waiting").glob(".journal.*")).name.replace(
            "journal", "side-files"
        )
        (root / "waiting" / side_files).mkdir()
        shutil.copy(root / "over" / "config.json", root / "waiting" / side_files)
        left = ["full", "later", "over", "half", "waiting"]
        self.loads = run_batch(
            [sharded(KIND, root / name, id=name) for name in left], way, WITH_OURS
        )

    @staticmethod
    def _kill_in_the_last_step(complete: Path, half: Path) -> None:
        """What a save leaves that is killed after it was published: one part has its name, others not."""
        shutil.copytree(complete, half)
        manifest = edit.read_manifest(half)
        files = sorted(manifest["ranks"][0]["files"])
        for name in files[1:]:
            (half / name).rename(half / f".{name}.{manifest['save_id']}.tmp")
        old = ["model-rank-0-part-98.safetensors", "hidden-state-rank-0-part-99.safetensors"]
        for name in old:
            (half / name).write_text("of the checkpoint before")
        journal = half / f".journal.{manifest['save_id']}.tmp"
        journal.write_text(json.dumps({"files": files, "replaced": [*files, *old]}))


@pytest.fixture(scope="module", params=WAYS, ids=lambda way: "-".join(way))
def faults(
    request: pytest.FixtureRequest, zoo: Zoo, tmp_path_factory: pytest.TempPathFactory
) -> Faults:
    way, layout = request.param
    return Faults(way, layout, zoo, tmp_path_factory.mktemp(f"faults-{way}-{layout}"))


def _said(result: Result, word: str) -> None:
    assert result["error"] is not None, "the save said nothing"
    assert result["error"]["stage"] == "save", explain(result)
    assert result["error"]["type"] == "SaveError", explain(result)
    assert word in result["error"]["message"]


@pytest.mark.parametrize("name", ["no directory", "below a file"])
def test_a_place_that_is_no_directory_is_refused(faults: Faults, name: str) -> None:
    _said(faults.saves[name], str(faults.root / "file"))


def test_an_earlier_checkpoint_outlives_a_save_over_it_that_fails(faults: Faults) -> None:
    """Of what it was, all is there; of the other model, nothing."""
    _said(faults.saves["over it, full"], str(faults.root / "over"))
    complete = faults.saves["complete"]
    assert complete["error"] is None, explain(complete)
    load = faults.loads["over"]
    assert load["error"] is None, explain(load)
    assert differences(load["snapshot"], complete["snapshot"]) == []
    listed = set(edit.read_manifest(faults.root / "over")["ranks"][0]["files"])
    found = {path.name for path in (faults.root / "over").iterdir() if "safetensors" in path.name}
    assert found == listed, "the save that failed left files of its own"


def test_a_save_killed_in_its_last_step_loads(faults: Faults) -> None:
    load = faults.loads["half"]
    assert load["error"] is None, explain(load)
    assert differences(load["snapshot"], faults.saves["complete"]["snapshot"]) == []


def test_a_config_that_a_kill_kept_back_is_told(faults: Faults) -> None:
    error = faults.loads["waiting"]["error"]
    assert error is not None, "the engine was configured by an earlier save's file"
    assert error["type"] == "IncompleteError", explain(faults.loads["waiting"])
    assert "config.json" in error["message"]
    assert f"vllm_sharded_state.checkpoint.staging {faults.root / 'waiting'}" in error["message"]


@pytest.mark.parametrize(("name", "directory"), [("full", "full"), ("full later", "later")])
def test_a_full_disk_is_told_and_leaves_nothing_that_loads(
    faults: Faults, name: str, directory: str
) -> None:
    _said(faults.saves[name], str(faults.root / directory))
    assert not (faults.root / directory / edit.MANIFEST).exists()
    load = faults.loads[directory]
    assert load["error"] is not None, "what a failed save left was loaded"
    # Without a config, which is written last, vLLM itself finds no model there.
    found = (faults.root / directory / "config.json").exists()
    assert ("ShardedStateError" in load["error"]["bases"]) == found, explain(load)


def test_the_engine_saves_after_that(faults: Faults) -> None:
    assert faults.saves["complete"]["error"] is None, explain(faults.saves["complete"])
    assert faults.saves["well"]["error"] is None, explain(faults.saves["well"])
