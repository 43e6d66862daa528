"""Two ranks: what they saved comes back to two, and is refused by one."""

from pathlib import Path

import pytest

from tests.support.engine import Spec, run_engine
from tests.support.engine_lab import explain
from tests.support.lab import WITH_OURS, Result, Zoo, without_ours
from tests.zoo.kinds import KINDS, PACKED

pytestmark = pytest.mark.engine

KIND = "llama-kv-head"
#: A core for each rank.
CORES = {"VLLM_CPU_OMP_THREADS_BIND": "0|1"}


def _spec(model: Path, ranks: int, **more: object) -> Spec:
    engine = dict(KINDS[KIND].engine) | {"tensor_parallel_size": ranks}
    return Spec(str(model), engine, **more)  # type: ignore[arg-type]


def _start(model: Path, ranks: int) -> Result:
    spec = _spec(model, ranks)
    spec.engine |= {"load_format": "sharded_state"}
    return run_engine(spec, PACKED, WITH_OURS, **(CORES if ranks > 1 else {}))


@pytest.fixture(scope="module")
def saved(zoo: Zoo, tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("ranks") / "saved"
    spec = _spec(zoo.path(KIND), 2, save=str(directory))
    saving = run_engine(spec, PACKED, WITH_OURS, **CORES)
    assert saving["error"] is None, explain(saving)
    return directory


def test_one_rank_is_refused_what_two_saved(saved: Path) -> None:
    for rank in (0, 1):
        assert list(saved.glob(f"model-rank-{rank}-part-*.safetensors"))
    loading = _start(saved, 1)
    assert loading["error"] is not None, "it was loaded"
    said = loading["error"]["message"] + loading["log"]
    assert "tensor_parallel_size: saved 2, here 1" in said, explain(loading)


@pytest.mark.full
def test_two_ranks_come_back(zoo: Zoo, saved: Path) -> None:
    reference = run_engine(_spec(zoo.path(KIND), 2), PACKED, without_ours(PACKED), **CORES)
    assert reference["error"] is None, explain(reference)
    loading = _start(saved, 2)
    assert loading["error"] is None, explain(loading)
    assert loading["outputs"] == reference["outputs"]
