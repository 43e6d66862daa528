"""The batches of these tests, each one process, run when a test first asks for its results."""

import shutil
from collections.abc import Iterable
from functools import cached_property
from pathlib import Path
from typing import Any

from tests.quantization import checkpoint
from tests.quantization.table import OWN_REFERENCE
from tests.support.batch import Job, run_batch
from tests.support.lab import WAYS_ONLY, WITH_OURS, Result
from tests.zoo.kinds import TENSORS

#: Method and seed; the seed is 0 except for the random ones.
Case = tuple[str, int]


def name(case: Case) -> str:
    return f"{case[0]}-{case[1]}"


def parts(case: str) -> Case:
    """Method and seed of a case by name."""
    method, _, seed = case.rpartition("-")
    return method, int(seed)


def _runs(name: str) -> bool:
    """Whether each kernel of the model answers what the snapshot asks: a packed head can't look up."""
    return "head_" not in name


class MethodsLab:
    """All in the way `tensors`: what is left of vLLM's own layers there holds nothing native.

    `saved` lists the (case, layout) pairs to save and load, `stock_saved` the cases that stock saves
    and our plugin loads, `stock_loaded` those that our plugin saves in source layout and stock loads.
    """

    def __init__(
        self,
        root: Path,
        saved: Iterable[tuple[str, str]],
        stock_saved: Iterable[str] = (),
        stock_loaded: Iterable[str] = (),
    ) -> None:
        self.root = root
        self._stock_saved = sorted(set(stock_saved))
        self._stock_loaded = sorted(set(stock_loaded))
        self._loaded = sorted(set(saved))
        self._saved = sorted({*self._loaded, *((case, "source") for case in self._stock_loaded)})
        cases = sorted({*self._stock_saved, *(case for case, _ in self._saved)})
        self.models = {case: checkpoint.write(root, *parts(case)) for case in cases}

    def saved(self, case: str, layout: str) -> Path:
        return self.root / f"saved.{case}.{layout}"

    def stock_saved(self, case: str) -> Path:
        return self.root / f"stock.{case}"

    @cached_property
    def references(self) -> dict[str, Result]:
        """By case: stock loads the original, and shows what only use shows."""
        return self._run([self.job(case) for case in self.models], WAYS_ONLY)

    @cached_property
    def stock_saves(self) -> dict[str, Result]:
        """By case: stock loads the original and saves it."""
        jobs = [
            self.job(case, save=str(self.stock_saved(case)), mutate=None)
            for case in self._stock_saved
        ]
        results = self._run(jobs, WAYS_ONLY)
        for case in self._stock_saved:
            for path in self.models[case].iterdir():
                if path.suffix == ".json" and "index" not in path.name:
                    shutil.copy(path, self.stock_saved(case))
        return results

    @cached_property
    def saves(self) -> dict[str, Result]:
        """By "case.layout": our plugin loads the original and saves it."""
        jobs = [
            self.job(
                case,
                id=f"{case}.{layout}",
                save=str(self.saved(case, layout)),
                layout=layout,
                mutate=None,
                snapshot_after=True,
            )
            for case, layout in self._saved
        ]
        return self._run(jobs, WITH_OURS)

    @cached_property
    def loads(self) -> dict[str, Result]:
        """By "case.layout", and "case.stock" for what stock saved: loaded by our plugin."""
        jobs = [
            self.sharded(self.saved(case, layout), id=f"{case}.{layout}", poison=True)
            for case, layout in self._loaded
            if self.saves[f"{case}.{layout}"]["error"] is None
        ]
        jobs += [
            self.sharded(self.stock_saved(case), id=f"{case}.stock", poison=True)
            for case in self._stock_saved
            if self.stock_saves[case]["error"] is None
        ]
        return self._run(jobs, WITH_OURS)

    @cached_property
    def stock_loads(self) -> dict[str, Result]:
        """By case: what our plugin saved in source layout, loaded by stock."""
        jobs = [
            self.sharded(self.saved(case, "source"), id=case)
            for case in self._stock_loaded
            if self.saves[f"{case}.source"]["error"] is None
        ]
        return self._run(jobs, WAYS_ONLY)

    @cached_property
    def tries(self) -> dict[str, Result]:
        """By "case.layout": our plugin loads the original, tries to save it, and looks at it then."""
        jobs = [
            self.job(case, id=f"{case}.{layout}", layout=layout, mutate="try_to_save")
            for case, layout in self._saved
        ]
        return self._run(jobs, WITH_OURS)

    def job(self, case: str, **more: Any) -> Job:
        settings: dict[str, Any] = {
            "id": case,
            "model": str(self.models[case]),
            "register": "tests.quantization.register",
            "mutate": "reveal_methods",
            "kernels": _runs(case),
        }
        return Job(**(settings | more))

    def sharded(self, directory: Path, **more: Any) -> Job:
        settings: dict[str, Any] = {
            "id": directory.name,
            "model": str(directory),
            "engine": {"load_format": "sharded_state"},
            "register": "tests.quantization.register",
            "mutate": "reveal_methods",
            "kernels": _runs(directory.name),
        }
        return Job(**(settings | more))

    def truth(self, case: str, layout: str) -> dict[str, Any]:
        """The snapshot that a load has to equal."""
        if self.is_own_reference(case):
            return self.saves[f"{case}.{layout}"]["snapshot"]
        reference = self.references[case]
        assert reference["error"] is None, reference["error"]
        return reference["snapshot"]

    @staticmethod
    def is_own_reference(case: str) -> bool:
        """Whether two stock processes would differ; see `table.OWN_REFERENCE`."""
        return parts(case)[0] in OWN_REFERENCE

    @staticmethod
    def _run(jobs: list[Job], plugins: str) -> dict[str, Result]:
        return run_batch(jobs, TENSORS, plugins) if jobs else {}
