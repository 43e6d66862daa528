"""Runs batches when a test first asks, once a session, for exactly the cases that were collected.

For each way: one process that takes the references (our plugin disabled), one that saves, another
that loads what was saved and saves again, and a last one that loads that.
"""

from collections.abc import Iterable
from functools import cached_property
from pathlib import Path
from typing import Any

from tests.support.batch import Job, run_batch
from tests.zoo.kinds import KINDS, PACKED, Kind

#: Plugins of a reference process: never ours. The packed way needs none at all.
WAYS_ONLY = "vss_test_ways"
WITH_OURS = "sharded_state,vss_test_ways"

Result = dict[str, Any]
#: kind, layout
Case = tuple[str, str]


def without_ours(way: str) -> str:
    """VLLM_PLUGINS of a reference process."""
    return "" if way == PACKED else WAYS_ONLY


class Zoo:
    """The checkpoints, written when first asked for."""

    def __init__(self, root: Path) -> None:
        self.root = root

    def path(self, kind: str) -> Path:
        directory = self.root / kind
        if not directory.exists():
            KINDS[kind].build().write(directory)
        return directory

    def job(self, kind: str, **more: Any) -> Job:
        """A job that loads the kind's own checkpoint and changes it as the kind says."""
        found: Kind = KINDS[kind]
        settings: dict[str, Any] = {
            "id": kind,
            "model": str(self.path(kind)),
            "engine": dict(found.engine),
            "mutate": found.mutate,
        }
        return Job(**(settings | more))


def sharded(kind: str, directory: Path, **more: Any) -> Job:
    """A job that starts `kind` from the sharded state in `directory`."""
    engine = dict(KINDS[kind].engine) | {"load_format": "sharded_state"}
    settings: dict[str, Any] = {"id": kind, "model": str(directory), "engine": engine}
    return Job(**(settings | more))


class Lab:
    """All batches of one way. Each property is a process, run once."""

    def __init__(
        self, way: str, zoo: Zoo, root: Path, cases: Iterable[Case], again: Iterable[Case]
    ) -> None:
        self.way = way
        self.zoo = zoo
        self.root = root / way
        self.cases = sorted(set(cases))
        self.again = sorted(set(again))

    def saved(self, kind: str, layout: str, generation: int = 1) -> Path:
        return self.root / f"{kind}.{layout}.{generation}"

    @cached_property
    def references(self) -> dict[str, Result]:
        """By kind: the original checkpoint, loaded by stock vLLM."""
        jobs = [self.zoo.job(kind) for kind in sorted({kind for kind, _ in self.cases})]
        return run_batch(jobs, self.way, without_ours(self.way))

    @cached_property
    def saves(self) -> dict[str, Result]:
        """By "kind.layout": the original loaded, looked at, saved, and looked at again."""
        jobs = [
            self.zoo.job(
                kind,
                id=f"{kind}.{layout}",
                save=str(self.saved(kind, layout)),
                layout=layout,
                snapshot_after=True,
            )
            for kind, layout in self.cases
        ]
        return run_batch(jobs, self.way, WITH_OURS)

    @cached_property
    def loads(self) -> dict[str, Result]:
        """By "kind.layout": what was saved, loaded in another process; those of `again` saved anew."""
        return self._load(1, self.cases, self.saves)

    @cached_property
    def loads_again(self) -> dict[str, Result]:
        """By "kind.layout": what the process that had loaded sharded state saved."""
        return self._load(2, self.again, self.loads)

    def _load(
        self, generation: int, cases: list[Case], before: dict[str, Result]
    ) -> dict[str, Result]:
        def next_save(case: Case) -> str | None:
            wanted = generation == 1 and case in self.again
            return str(self.saved(*case, generation + 1)) if wanted else None

        jobs = [
            sharded(
                kind,
                self.saved(kind, layout, generation),
                id=f"{kind}.{layout}",
                save=next_save((kind, layout)),
                layout=layout,
            )
            for kind, layout in cases
            # What could not be saved fails as a save; loading its remains says nothing more.
            if (done := before.get(f"{kind}.{layout}")) is not None and done["error"] is None
        ]
        return run_batch(jobs, self.way, WITH_OURS)


def explain(result: Result) -> str:
    """The error of a job in full, for an assertion's message."""
    error = result["error"]
    return "" if error is None else f"{error['stage']}: {error['traceback']}"
