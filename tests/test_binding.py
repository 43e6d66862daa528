"""Real models: a load by other kernels, or from another source than was asked for, is refused by name."""

from pathlib import Path

import pytest

from tests.support import edit
from tests.support.batch import run_batch
from tests.support.lab import WITH_OURS, Result, Zoo, explain, sharded
from tests.zoo.decoders import llama
from tests.zoo.kinds import PACKED, TENSORS

pytestmark = pytest.mark.engine

KIND = "llama"
KERNEL = "vllm.Other"
UNIT = "model.layers.0.mlp.down_proj"
#: What is in runtime layout there, in both ways: attention, at least.
MIXED = "llama-kv"


class Bound:
    def __init__(self, zoo: Zoo, root: Path) -> None:
        self.root = root
        self.origin = zoo.path(KIND)
        llama(vocab=250, seed=1).write(root / "fine-tune")

        def save(name: str, kind: str = KIND, **more: object):  # type: ignore[no-untyped-def]
            return zoo.job(kind, id=name, save=str(root / name), snapshot=False, **more)

        def load(name: str, saved: str, kind: str = KIND, **engine: object):  # type: ignore[no-untyped-def]
            job = sharded(kind, root / saved, id=name, snapshot=False)
            job.engine |= engine
            return job

        def source(path: object) -> dict[str, object]:
            return {"model_loader_extra_config": {"source": str(path)}}

        again = load("again", "runtime")
        again.save = str(root / "again")
        self.saves = run_batch(
            [
                save("runtime", layout="runtime"),
                save("source", layout="source"),
                save("mixed", MIXED),
                save("dummy", engine={"load_format": "dummy"}),
                again,
            ],
            TENSORS,
            WITH_OURS,
        )
        for name in ("chosen", "processed"):
            directory = edit.copy(root / "runtime", root / name)
            found = edit.read_manifest(directory)
            unit = found["ranks"][0]["units"][UNIT]
            unit["choices" if name == "chosen" else "processed"] = {"quant_method": KERNEL}
            edit.write_manifest(directory, found)
        switched = [load("switched", "runtime"), load("switched, source", "source")]
        self.loads = run_batch(
            [
                load("same", "runtime"),
                load("chosen", "chosen"),
                load("processed", "processed"),
                load("its source", "runtime", **source(self.origin)),
                load("its source, again", "again", **source(self.origin)),
                load("another source", "runtime", **source(root / "fine-tune")),
                load("another source, again", "again", **source(root / "fine-tune")),
                load("no source", "dummy", **source(self.origin)),
                load("nowhere", "runtime", **source(root / "nowhere")),
            ],
            TENSORS,
            WITH_OURS,
        )
        self.loads |= run_batch(switched, TENSORS, WITH_OURS, VLLM_CPU_INT4_W4A8="0")
        self.loads |= run_batch(
            [
                load("packed", "runtime"),
                load("packed, mixed", "mixed", MIXED),
                load("packed, source", "source"),
            ],
            PACKED,
            WITH_OURS,
        )


@pytest.fixture(scope="module")
def bound(zoo: Zoo, tmp_path_factory: pytest.TempPathFactory) -> Bound:
    return Bound(zoo, tmp_path_factory.mktemp("bound"))


def _refused(result: Result, *words: str, type: str = "MismatchError") -> None:
    assert result["error"] is not None, "it was loaded"
    assert result["error"]["type"] == type, explain(result)
    for word in words:
        assert word in result["error"]["message"], result["error"]["message"]


@pytest.mark.parametrize("name", ["runtime", "source", "mixed", "dummy", "again"])
def test_they_are_saved(bound: Bound, name: str) -> None:
    assert bound.saves[name]["error"] is None, explain(bound.saves[name])


@pytest.mark.parametrize(
    "name",
    ["same", "switched, source", "packed, source", "its source", "its source, again"],
)
def test_what_is_harmless_loads(bound: Bound, name: str) -> None:
    assert bound.loads[name]["error"] is None, explain(bound.loads[name])


@pytest.mark.parametrize("name", ["packed", "packed, mixed"])
def test_runtime_layout_is_refused_by_the_cpu_that_packs(bound: Bound, name: str) -> None:
    _refused(bound.loads[name], "runtime.cpu_onednn: saved False, here True", "layout=source")


def test_runtime_layout_is_refused_under_another_switch(bound: Bound) -> None:
    line = "runtime.environment.VLLM_CPU_INT4_W4A8: saved nothing, here False"
    _refused(bound.loads["switched"], line)


@pytest.mark.parametrize("name", ["chosen", "processed"])
def test_another_kernel_of_one_module_is_refused_by_name(bound: Bound, name: str) -> None:
    real = edit.read_manifest(bound.root / "runtime")["ranks"][0]["units"][UNIT]["method"]
    _refused(
        bound.loads[name], f"{UNIT}: quant_method: saved {KERNEL!r}, here {real!r}", "layout=source"
    )


@pytest.mark.parametrize("name", ["another source", "another source, again"])
def test_another_fine_tune_is_not_taken_for_the_source(bound: Bound, name: str) -> None:
    files = [f"{path.name}: other content" for path in bound.origin.glob("*.safetensors")]
    assert files
    _refused(bound.loads[name], *files, str(bound.origin))


def test_what_records_no_source_is_refused_when_one_is_asked_for(bound: Bound) -> None:
    assert edit.read_manifest(bound.root / "dummy")["source"] is None
    _refused(bound.loads["no source"], "does not record what it was saved from")
    _refused(bound.loads["nowhere"], str(bound.root / "nowhere"), type="OptionError")


def test_saving_again_hands_on_the_source(bound: Bound) -> None:
    first = edit.read_manifest(bound.root / "runtime")
    again = edit.read_manifest(bound.root / "again")
    assert again["source"] == first["source"] | {"through": [first["save_id"]]}


def test_side_files_are_recorded_and_not_checked(bound: Bound) -> None:
    listed = edit.read_manifest(bound.root / "runtime")["side_files"]
    assert listed["config.json"]["size"] == (bound.root / "runtime" / "config.json").stat().st_size
