"""What was saved of a method, saved again by the engine that loaded it, and changed from outside."""

from collections.abc import Callable
from functools import cached_property
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from tests.quantization.lab import MethodsLab
from tests.quantization.table import AGAIN, BY_NAME, DEEPER, LAYOUTS, SOURCE_ONLY, TABLE
from tests.quantization.test_quantization import wrong
from tests.support import edit
from tests.support.batch import Job, run_batch
from tests.support.lab import WITH_OURS, Result, explain

pytestmark = pytest.mark.engine

#: Tensors of one decoder layer and of what is around it, in each of which something is changed.
CHANGED = (
    "model.layers.0.self_attn.qkv_proj",
    "model.layers.0.mlp.down_proj",
    "model.layers.0.input_layernorm",
    "model.norm",
    "lm_head",
)
CASES = [
    (method, layout)
    for method in AGAIN
    for layout in ("runtime", "source")
    if not (layout == "runtime" and TABLE[method] == SOURCE_ONLY)
]


class Directories:
    """A few methods' directories, and what became of them."""

    def __init__(self, root: Path) -> None:
        self.root = root
        pairs = [(f"{method}-0", layout) for method, layout in (*CASES, *DEEPER)]
        self.lab = MethodsLab(root, pairs)

    def again(self, method: str, layout: str, generation: int) -> Path:
        return self.root / f"again.{method}.{layout}.{generation}"

    @cached_property
    def second_saves(self) -> dict[str, Result]:
        """By "method.layout": loaded from a directory, and saved in the same layout."""
        return self._save(lambda method, layout: self.lab.saved(f"{method}-0", layout), 2)

    @cached_property
    def third_saves(self) -> dict[str, Result]:
        return self._save(lambda method, layout: self.again(method, layout, 2), 3)

    @cached_property
    def third_loads(self) -> dict[str, Result]:
        jobs = [
            self.lab.sharded(self.again(method, layout, 3), id=f"{method}.{layout}")
            for method, layout in CASES
            if self.third_saves[f"{method}.{layout}"]["error"] is None
        ]
        return run_batch(jobs, "tensors", WITH_OURS)

    def _save(self, where: Callable[[str, str], Path], generation: int) -> dict[str, Result]:
        before = self.lab.saves if generation == 2 else self.second_saves
        jobs = []
        for method, layout in CASES:
            id_ = f"{method}-0.{layout}" if generation == 2 else f"{method}.{layout}"
            if before[id_]["error"] is None:
                job = self.lab.sharded(where(method, layout), id=f"{method}.{layout}", mutate=None)
                job.save, job.layout = str(self.again(method, layout, generation)), layout
                jobs.append(job)
        return run_batch(jobs, "tensors", WITH_OURS)

    @cached_property
    def changed(self) -> dict[str, Result]:
        """By "method.layout/key": one byte of that tensor changed, and the checksums made to fit."""
        jobs: list[Job] = []
        for method, layout in DEEPER:
            saved = self.lab.saved(f"{method}-0", layout)
            assert self.lab.saves[f"{method}-0.{layout}"]["error"] is None
            for file in sorted(saved.glob("*.safetensors")):
                for key in sorted(load_file(file)):
                    if key.startswith(CHANGED):
                        copy = edit.copy(saved, self.root / f"changed{len(jobs)}")
                        edit.rewrite(copy / file.name, _flip(key))
                        edit.list_again(copy, copy / file.name)
                        jobs.append(self.lab.sharded(copy, id=f"{method}.{layout}/{key}"))
        return run_batch(jobs, "tensors", WITH_OURS)


def _flip(key: str) -> Callable[[edit.Tensors], None]:
    def change(tensors: edit.Tensors) -> None:
        raw = tensors[key].view(-1).view(torch.uint8)
        raw[len(raw) // 2] ^= 1  # the least bit of a byte in the middle

    return change


@pytest.fixture(scope="module")
def tried(tmp_path_factory: pytest.TempPathFactory) -> MethodsLab:
    pairs = [(f"{method}-0", layout) for method in BY_NAME for layout in LAYOUTS]
    return MethodsLab(tmp_path_factory.mktemp("tried"), pairs)


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("method", BY_NAME)
def test_a_save_harms_no_live_registry(tried: MethodsLab, method: str, layout: str) -> None:
    """Whether or not the save was refused, the live model goes on computing what it did."""
    after = tried.tries[f"{method}-0.{layout}"]
    assert after["error"] is None, explain(after)
    kernels = tried.references[f"{method}-0"]["snapshot"]["kernels"]
    assert kernels
    assert after["snapshot"]["kernels"] == kernels


@pytest.fixture(scope="module")
def directories(tmp_path_factory: pytest.TempPathFactory) -> Directories:
    return Directories(tmp_path_factory.mktemp("directories"))


@pytest.mark.parametrize(("method", "layout"), CASES)
def test_a_loaded_engine_saves_again(directories: Directories, method: str, layout: str) -> None:
    for saves in (directories.second_saves, directories.third_saves):
        saving = saves[f"{method}.{layout}"]
        assert saving["error"] is None, explain(saving)
    loading = directories.third_loads[f"{method}.{layout}"]
    assert loading["error"] is None, explain(loading)
    assert wrong(loading["snapshot"], directories.lab.truth(f"{method}-0", layout)) == []


@pytest.mark.parametrize(("method", "layout"), DEEPER)
def test_any_changed_tensor_shows(directories: Directories, method: str, layout: str) -> None:
    results = {
        key.partition("/")[2]: result
        for key, result in directories.changed.items()
        if key.startswith(f"{method}.{layout}/")
    }
    for part in CHANGED:
        assert any(key.startswith(part) for key in results), part
    truth = directories.lab.truth(f"{method}-0", layout)
    for key, result in results.items():
        if result["error"] is not None:
            assert "ShardedStateError" in result["error"]["bases"], explain(result)
        else:
            lines = wrong(result["snapshot"], truth)
            assert any(key.rpartition(".")[0] in line for line in lines), key
