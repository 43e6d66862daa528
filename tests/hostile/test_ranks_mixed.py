"""Two ranks, in two processes: no rank loads what another one saved."""

import tempfile
from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from tests.hostile import spoil
from tests.hostile.goods import GOODS, LIMIT_S, PART
from tests.support import edit
from tests.support.batch import Job, run_batch
from tests.support.lab import WITH_OURS, Result, explain, sharded
from tests.support.snapshot import differences
from tests.zoo.kinds import TENSORS

pytestmark = pytest.mark.engine

GOOD = GOODS["runtime"]
RANKS = (0, 1)


def _part(rank: int, number: int = 0) -> str:
    return f"model-rank-{rank}-part-{number}.safetensors"


def _hidden(rank: int) -> str:
    return f"hidden-state-rank-{rank}-part-0.safetensors"


def _swap(*names: str) -> Callable[[Path], None]:
    """Exchange files, each with the one of the other rank."""

    def change(directory: Path) -> None:
        for name in names:
            a, b = directory / name, directory / name.replace("rank-0", "rank-1")
            first, second = a.read_bytes(), b.read_bytes()
            spoil.write(a, second)
            spoil.write(b, first)

    return change


def _both(*changes: Callable[[Path], None]) -> Callable[[Path], None]:
    def change(directory: Path) -> None:
        for one in changes:
            one(directory)

    return change


def _relist(directory: Path) -> None:
    spoil.relist(directory, *directory.glob("*.safetensors"))


def _entries_swapped(directory: Path) -> None:
    """Each rank is told to read the other's files."""

    def change(manifest: spoil.Data) -> None:
        a, b = manifest["ranks"]
        a["rank"], b["rank"] = b["rank"], a["rank"]
        manifest["ranks"] = [b, a]

    spoil.edit_manifest(directory, change)


def _names_swapped(directory: Path) -> None:
    """The manifest has each rank's checksums under the other's file names; so have the files."""

    def change(manifest: spoil.Data) -> None:
        a, b = manifest["ranks"]
        for field in ("files", "tensors", "values", "kernels"):
            a[field], b[field] = b[field], a[field]

    spoil.edit_manifest(directory, change)


def _one_gone(directory: Path) -> None:
    spoil.edit_manifest(directory, lambda manifest: manifest["ranks"].pop(1))


def _one_twice(directory: Path) -> None:
    def change(manifest: spoil.Data) -> None:
        manifest["ranks"][1] = manifest["ranks"][0] | {"rank": 1}

    spoil.edit_manifest(directory, change)


def _copied(directory: Path) -> None:
    """Rank 1's part is rank 0's, byte for byte."""
    spoil.write(directory / _part(1), (directory / _part(0)).read_bytes())


def _of_one_rank(directory: Path) -> None:
    """The manifest says that it was one rank that saved: rank 0's part stands for the whole."""

    def change(manifest: spoil.Data) -> None:
        manifest["binding"]["world"]["tensor_parallel_size"] = 1
        manifest["ranks"].pop(1)

    spoil.edit_manifest(directory, change)


#: What is done, and the ranks that have to refuse it: those that would read something else.
CASES: dict[str, tuple[Callable[[Path], None], tuple[int, ...]]] = {
    "parts swapped": (_swap(_part(0)), RANKS),
    "parts swapped, listed": (_both(_swap(_part(0)), _relist), RANKS),
    "a rank's part for the other's": (_copied, (1,)),
    "a rank's part for the other's, listed": (_both(_copied, _relist), (1,)),
    "ranks swapped in the manifest": (_entries_swapped, RANKS),
    "what ranks hold swapped in the manifest": (_names_swapped, RANKS),
    "a rank gone": (_one_gone, RANKS),
    "one rank twice": (_one_twice, RANKS),
    "a part gone": (lambda directory: (directory / _part(1)).unlink(), (1,)),
    "a hidden part gone": (lambda directory: (directory / _hidden(1)).unlink(), (1,)),
    "a world of one": (_of_one_rank, RANKS),
}


def _run(jobs: Iterable[Job]) -> dict[int, dict[str, Result]]:
    """Run `jobs` in two processes at once, a rank each; by rank."""
    jobs = list(jobs)
    with tempfile.TemporaryDirectory() as meeting, ThreadPoolExecutor(2) as pool:

        def rank(number: int) -> dict[str, Result]:
            world = {
                "VSS_TEST_WORLD": f"{number}/2{meeting}/world",
                # What vLLM's executor names the ranks' shared memory after.
                "VLLM_DIST_IDENT": Path(meeting).name,
            }
            return run_batch(jobs, TENSORS, WITH_OURS, timeout=300, **world)

        return dict(zip(RANKS, pool.map(rank, RANKS), strict=True))


def _job(model: Path, **more: object) -> Job:
    job = sharded(GOOD.kind, model, limit_s=10 * LIMIT_S, kernels=False, **more)
    job.engine["tensor_parallel_size"] = 2
    return job


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, dict[int, dict[str, Result]]]:
    """A directory that two ranks saved, and what they held."""
    root = tmp_path_factory.mktemp("two-ranks")
    model = GOOD.build().write(root / "model")
    job = _job(model, id="save", save=str(root / "saved"), layout="runtime", max_size=2 * PART)
    del job.engine["load_format"]
    results = _run([job])
    for rank in RANKS:
        assert results[rank]["save"]["error"] is None, explain(results[rank]["save"])
    return root / "saved", results


@pytest.fixture(scope="module")
def loads(
    saved: tuple[Path, dict[int, dict[str, Result]]], tmp_path_factory: pytest.TempPathFactory
) -> dict[int, dict[str, Result]]:
    root = tmp_path_factory.mktemp("mixed")
    jobs = [_job(saved[0], id="untouched")]
    for number, (name, (change, _)) in enumerate(CASES.items()):
        directory = edit.copy(saved[0], root / str(number))
        change(directory)
        jobs.append(_job(directory, id=name, snapshot=False))
    return _run(jobs)


@pytest.mark.parametrize("rank", RANKS)
def test_each_rank_gets_back_its_own(
    saved: tuple[Path, dict[int, dict[str, Result]]],
    loads: dict[int, dict[str, Result]],
    rank: int,
) -> None:
    untouched = loads[rank]["untouched"]
    assert untouched["error"] is None, explain(untouched)
    assert differences(untouched["snapshot"], saved[1][rank]["save"]["snapshot"]) == []
    other = saved[1][1 - rank]["save"]["snapshot"]
    assert differences(untouched["snapshot"], other), "the ranks hold the same"


@pytest.mark.parametrize("case", CASES)
def test_what_is_another_ranks_is_refused(loads: dict[int, dict[str, Result]], case: str) -> None:
    for rank in CASES[case][1]:
        error = loads[rank][case]["error"]
        assert error is not None, f"rank {rank} loaded it"
        assert error["stage"] == "load"
        assert "ShardedStateError" in error["bases"], explain(loads[rank][case])
        assert "rank" in error["message"] or "saved 1, here 2" in error["message"]
