"""One rank's entry of a manifest with its parts: what is there, and whether it fits a model.

Everything here looks, and nothing is changed: what a load asks before it fills a model that was just
built, a reload asks before it touches one that runs.
"""

from collections.abc import Iterable, Mapping
from typing import Any

import torch
from torch import nn
from vllm.logger import init_logger

from .checkpoint.dtypes import dtype_name, holds
from .checkpoint.manifest import AGAIN, RankEntry, TensorEntry
from .checkpoint.reading import Reader, unmatched
from .errors import MismatchError, RestoreError, listed
from .faults import Faults
from .filling import Filling, Origin
from .progress import Progress
from .state import kernels
from .state.choices import choices, different, together
from .state.unit_state import method_name
from .state.units import Unit
from .values import Values

logger = init_logger("vllm.sharded_state.restore")

#: Tensors of one stage, by path.
Entries = dict[str, TensorEntry]


class SavedRank:
    """The entry of one rank, and the open `reader` of its parts in `directory`.

    early, late: its tensors that are placed before processing, and after, by path. absent: paths whose
    tensors are in no part, which only `strict` false allows. values: its Python values.

    Raises `ManifestError`, or `IncompleteError`, `UnexpectedTensorError` and `TensorMismatchError` where
    parts hold something else than the entry lists.
    """

    def __init__(self, directory: object, entry: RankEntry, reader: Reader, strict: bool) -> None:
        self.directory = directory
        self.entry = entry
        self.reader = reader
        self.strict = strict
        self.values = Values(directory, entry.values)
        self.absent: set[str] = set()
        self.early = self._by_path("source")
        self.late = self._by_path("runtime")
        self._check_parts()

    @property
    def nbytes(self) -> int:
        """Bytes of all its tensors, each once."""
        return sum(entry.nbytes for entry in self.entry.tensors.values())

    def filling(self, entries: Entries, progress: Progress | None = None) -> Filling:
        """What reads `early` or `late`, by path."""
        return Filling(self.reader, lambda path: _origin(entries[path]), progress)

    def layout(self, unit: Unit) -> str:
        """The layout in which `unit` was saved."""
        return self.entry.units[unit.name].layout

    def refuse_other_units(self, split: Iterable[Unit]) -> None:
        """Raise `MismatchError` unless these, not processed yet, are the modules that were saved."""
        here = {unit.name: method_name(unit.root) if unit.processed else None for unit in split}
        saved = {name: unit.method for name, unit in self.entry.units.items()}
        wrong = [
            f"{name or '<model>'}: saved with {saved.get(name, 'nothing')}, here "
            f"{here.get(name, 'nothing')}"
            for name in sorted(saved.keys() | here.keys())
            if saved.get(name, "") != here.get(name, "")
        ]
        if wrong:
            raise MismatchError(
                f"{self.directory} was saved from a model with other modules:\n{listed(wrong)}\n"
                "Start the engine as it was when saving, or save again from this one."
            )

    def refuse_other_choices(self, split: Iterable[Unit], processed: bool) -> None:
        """Raise `MismatchError` unless units in runtime layout are run by the kernels of the save."""
        wrong = []
        for unit in split:
            saved = self.entry.units[unit.name]
            if unit.processed and saved.layout == "runtime":
                chosen = together(saved.choices, saved.processed) if processed else saved.choices
                wrong += [f"{unit.name}: {text}" for text in different(chosen, choices(unit))]
        if wrong:
            raise MismatchError(
                f"{self.directory} was saved for other kernels:\n{listed(wrong)}\n"
                "Start the engine as it was when saving, or save with layout=source (VSS_LAYOUT)."
            )

    def match(self, path: str, tensor: torch.Tensor, entries: Entries, faults: Faults) -> None:
        """Note in `faults` when the tensor of `path` is missing, or has another form than `tensor`."""
        entry = entries.get(path)
        if entry is None:
            faults.missing.append(path)
            return
        dtype = dtype_name(tensor.dtype) if holds(tensor.dtype) else str(tensor.dtype)
        if entry.shape != list(tensor.shape) or entry.dtype != dtype:
            faults.wrong.append(
                f"{path}: {entry.shape} {entry.dtype} saved, {list(tensor.shape)} {dtype} here"
            )

    def refuse_other_results(
        self, modules: Mapping[str, nn.Module], vllm_config: Any, names: Iterable[str]
    ) -> None:
        """Raise `RestoreError` unless the modules `names` compute what they did when saved.

        Bit for bit; on another machine, or with other versions, nothing is compared.
        """
        device = torch.device(vllm_config.device_config.device)
        if kernels.environment(device) != self.entry.kernel_environment:
            logger.debug("kernels are not compared: the machine is another")
            return
        wrong = []
        for name in names:
            checksum = self.entry.kernels[name]
            if name not in modules:
                wrong.append(f"{name} (this model has no such module)")
                continue
            try:
                result = kernels.digest(modules[name], vllm_config, device)
            except Exception as error:  # noqa: BLE001 - a kernel without its state may fail in any way
                result = f"{type(error).__name__}: {error}"
            if result != checksum:
                wrong.append(f"{name} ({result} instead of {checksum})")
        if wrong:
            raise RestoreError(
                f"Modules compute something else than when {self.directory} was saved, though all that "
                f"was saved of them is in place:\n{listed(wrong)}\n"
                "Some of their state lies where it can't be seen. Load the model's own checkpoint."
            )

    def _by_path(self, stage: str) -> Entries:
        return {
            path: entry
            for name, entry in self.entry.tensors.items()
            if entry.stage == stage
            for path in (name.removesuffix(AGAIN), *entry.aliases)
        }

    def _check_parts(self) -> None:
        """Every listed tensor is in its file, in the listed form, and no file holds another."""
        faults = Faults()
        faults.missing, faults.unexpected = unmatched(self.reader, self.entry)
        missing = set(faults.missing)
        present = {
            name: entry
            for name, entry in self.entry.tensors.items()
            if f"{entry.key} (in {entry.file})" not in missing
        }
        for name, entry in present.items():
            shape, dtype = self.reader.form(entry.file, entry.key)
            if (shape, dtype) != (entry.shape, entry.dtype):
                faults.wrong.append(
                    f"{name}: {entry.shape} {entry.dtype} was saved, {entry.file} has {shape} {dtype}"
                )
        faults.refuse(self.directory, self.strict)
        if missing:
            here = {id(entry) for entry in present.values()}
            for entries in (self.early, self.late):
                gone = [path for path, entry in entries.items() if id(entry) not in here]
                self.absent.update(gone)
                for path in gone:
                    del entries[path]


def _origin(entry: TensorEntry) -> Origin:
    return entry.file, entry.key, entry.checksum
