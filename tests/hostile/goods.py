"""The good directories that cases start from, and the batches that make and load them."""

from collections.abc import Iterable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path

from tests.support.batch import Job, run_batch, run_deadly_batch
from tests.support.lab import WITH_OURS, Result, explain, sharded
from tests.zoo import decoders
from tests.zoo import quantize as q
from tests.zoo.checkpoint import Builder, chain
from tests.zoo.kinds import PACKED, REFERENCE, TENSORS

#: Seconds that one load may take, and bytes by which it may make the process grow. A load of such a
#: model takes 0.03 s; the rest is for a machine that does other things too, and for big lies.
LIMIT_S = 20
GROWTH = 256 << 20
#: Parts of at most this many bytes: several of them.
PART = 256 * 1024


@dataclass(frozen=True)
class Good:
    """A saved directory: `build` makes the checkpoint, `kind` has its engine arguments."""

    kind: str
    way: str
    layout: str
    build: Builder
    max_size: int | None = None


def _kv_head(seed: int) -> Builder:
    return chain(lambda: decoders.llama(seed=seed), q.kv_per_head)


def _kv(seed: int) -> Builder:
    return chain(lambda: decoders.llama(seed=seed), q.kv_per_tensor)


_RUNTIME = Good("llama-kv-head", TENSORS, "runtime", _kv_head(0), PART)
_SOURCE = Good("llama-kv", TENSORS, "source", _kv(0))
#: By name. The first five are those that cases change; the rest is what gets mixed into them.
GOODS = {
    "runtime": _RUNTIME,
    "source": _SOURCE,
    "auto": replace(_RUNTIME, way=PACKED, layout="auto"),
    "tied": Good("llama-tied", REFERENCE, "runtime", lambda: decoders.llama(tied=True)),
    "fp8": Good(
        "llama-fp8-static-kv",
        REFERENCE,
        "runtime",
        chain(decoders.llama, q.fp8_static_kv),
        PART,
    ),
    "runtime again": _RUNTIME,
    "runtime tuned": replace(_RUNTIME, build=_kv_head(1)),
    "runtime as source": replace(_RUNTIME, layout="source"),
    "source tuned": replace(_SOURCE, build=_kv(1)),
    "biased": Good(
        "llama-kv-head",
        TENSORS,
        "runtime",
        chain(lambda: decoders.llama(bias=True), q.kv_per_head),
        PART,
    ),
}
BASES = ("runtime", "source", "auto", "tied", "fp8")


class Yard:
    """Where the good directories are, and what becomes of loads; each way in processes of its own."""

    def __init__(self, root: Path) -> None:
        self.root = root

    def good(self, name: str) -> Path:
        self.snapshots  # The batches that save run when this is first asked for.
        return self._saved(name)

    @cached_property
    def snapshots(self) -> dict[str, Result]:
        """By name: the model that was saved in the good directory, looked at before the save."""
        return self._by_way(self._save)

    def load(self, jobs: Iterable[tuple[str, Job]]) -> dict[str, Result]:
        """Load directories: (name of the good one they are like, job); the results by job id."""
        by_way: dict[str, list[Job]] = {way: [] for way in self._ways()}
        for name, job in jobs:
            by_way[GOODS[name].way].append(job)

        def run(way: str) -> dict[str, Result]:
            if not by_way[way]:
                return {}
            first = next(name for name in BASES if GOODS[name].way == way)
            warm = self.job(first, self.good(first), id=f"warm {way}", limit_s=None)
            return run_deadly_batch(warm, by_way[way], way, WITH_OURS)

        return self._by_way(run)

    def job(self, name: str, directory: Path, **more: object) -> Job:
        """A job that loads `directory` as the good one `name` is loaded."""
        settings: dict[str, object] = {"limit_s": LIMIT_S, "snapshot": False, "kernels": False}
        return sharded(GOODS[name].kind, directory, **(settings | more))

    def _save(self, way: str) -> dict[str, Result]:
        jobs = []
        for name, good in GOODS.items():
            if good.way == way:
                model = good.build().write(self.root / "models" / name)
                job = sharded(good.kind, model, id=name, save=str(self._saved(name)))
                del job.engine["load_format"]
                job.layout, job.max_size = good.layout, good.max_size
                jobs.append(job)
        results = run_batch(jobs, way, WITH_OURS)
        for name, result in results.items():
            assert result["error"] is None, f"{name}: {explain(result)}"
        return results

    def _saved(self, name: str) -> Path:
        return self.root / "good" / name.replace(" ", "-")

    @staticmethod
    def _ways() -> list[str]:
        return sorted({good.way for good in GOODS.values()})

    def _by_way(self, run) -> dict[str, Result]:
        with ThreadPoolExecutor(2) as pool:
            return {
                key: value for found in pool.map(run, self._ways()) for key, value in found.items()
            }
