"""Batches in which stock vLLM saves or loads: the faults that this package is for."""

import shutil
from collections.abc import Iterable
from functools import cached_property
from pathlib import Path

from tests.support.batch import run_batch
from tests.support.lab import WITH_OURS, Result, Zoo, sharded, without_ours


class StockLab:
    """What stock saves and loads in one way. Each property is a process, run once."""

    def __init__(self, way: str, zoo: Zoo, root: Path, kinds: Iterable[str]) -> None:
        self.way = way
        self.zoo = zoo
        self.root = root / f"stock-{way}"
        self.kinds = sorted(set(kinds))

    def saved(self, kind: str) -> Path:
        return self.root / kind

    def source(self, kind: str) -> Path:
        return self.root / f"{kind}.source"

    @cached_property
    def saves(self) -> dict[str, Result]:
        """By kind: the original as stock loads it (the reference), and saved by stock."""
        jobs = [self.zoo.job(kind, save=str(self.saved(kind))) for kind in self.kinds]
        results = run_batch(jobs, self.way, without_ours(self.way))
        for kind in self.kinds:
            # As upstream's example script does after saving.
            for file in self.zoo.path(kind).iterdir():
                if file.suffix != ".safetensors" and "index" not in file.name:
                    shutil.copy(file, self.saved(kind))
        return results

    @cached_property
    def loads(self) -> dict[str, Result]:
        """By kind: stock loads what stock saved."""
        return self._load(self.saved, without_ours(self.way), self.saves)

    @cached_property
    def ours_load(self) -> dict[str, Result]:
        """By kind: our plugin loads what stock saved."""
        return self._load(self.saved, WITH_OURS, self.saves)

    @cached_property
    def source_saves(self) -> dict[str, Result]:
        """By kind: our plugin saves in source layout."""
        jobs = [
            self.zoo.job(
                kind, save=str(self.source(kind)), layout="source", mutate=None, snapshot=False
            )
            for kind in self.kinds
        ]
        return run_batch(jobs, self.way, WITH_OURS)

    @cached_property
    def source_loads(self) -> dict[str, Result]:
        """By kind: stock loads what our plugin saved in source layout."""
        return self._load(self.source, without_ours(self.way), self.source_saves)

    def _load(self, where, plugins: str, before: dict[str, Result]) -> dict[str, Result]:  # type: ignore[no-untyped-def]
        jobs = [sharded(kind, where(kind)) for kind in self.kinds if before[kind]["error"] is None]
        return run_batch(jobs, self.way, plugins)
