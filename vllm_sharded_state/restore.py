"""Put a saved rank back into a model: source tensors before upstream processes it, the rest after.

Every tensor that the model reads has to be in the checkpoint, and every tensor of the checkpoint has
to find its place; names, shapes and dtypes are compared before anything is copied.
"""

import math
from collections.abc import Iterable
from typing import Any

import torch
from torch import nn
from vllm.logger import init_logger

from .adopt import adopt, can_adopt
from .checkpoint.dtypes import NAMES, dtype_name, holds
from .checkpoint.manifest import AGAIN, STOCK_STOP, RankEntry, TensorEntry
from .checkpoint.reading import Reader
from .errors import MismatchError, RestoreError, listed
from .faults import Faults
from .filling import Filling, Origin
from .mirrors import refuse_forged
from .options import Options
from .progress import Progress
from .remake import remake
from .state import kernels, placeholders, units
from .state.choices import choices, different, together
from .state.kv_scales import SCALE_BUFFERS, adopt_loaded_scales
from .state.twin import source_parameters
from .state.unit_state import method_name
from .state.units import Unit
from .state.walk import Kind, Leaf, join
from .values import Values, vacancy

logger = init_logger("vllm.sharded_state.restore")


class Restorer:
    """Restores one rank's entry of a manifest; `use_tqdm` is the engine's `use_tqdm_on_load`."""

    def __init__(
        self,
        directory: object,
        entry: RankEntry,
        reader: Reader,
        options: Options,
        use_tqdm: bool = True,
    ) -> None:
        self._directory = directory
        self._entry = entry
        self._reader = reader
        self._strict = options.strict
        self._values = Values(directory, entry.values)
        self._defaulted: dict[str, float] = {}
        self._absent: set[str] = set()
        self._early = self._by_path("source")
        self._late = self._by_path("runtime")
        self._check_files()
        self._progress = Progress(self._bytes(), use_tqdm)
        self._source = Filling(reader, lambda path: _origin(self._early[path]), self._progress)
        self._runtime = Filling(reader, lambda path: _origin(self._late[path]), self._progress)

    def close(self) -> None:
        """Close the files, and take the progress bar away."""
        self._progress.close()
        self._reader.close()

    def before_processing(self, model: nn.Module) -> None:
        """Fill source units, and give runtime units placeholders to be processed in their stead."""
        split = units.split(model)
        self._check_units(split)
        self._check_choices(split, processed=False)
        fills: list[tuple[str, torch.Tensor]] = []
        faults = Faults()
        expected: set[str] = set()
        for unit in split:
            if self._layout(unit) == "source":
                for key, tensor in source_parameters(unit).items():
                    expected.add(key)
                    fills.append((key, tensor))
                    self._match(key, tensor, self._early, faults)
        faults.unexpected += [path for path in self._early if path not in expected]
        faults.refuse(self._directory, self._strict)
        present = [(key, tensor) for key, tensor in fills if key in self._early]
        self._source.fill(present)
        for key, tensor in fills:
            if key not in self._early:
                self._default(key, tensor)
        self._source.refuse_overwritten(present)
        adopted = [unit for unit in split if self._is_adopted(unit)]
        read_scale = self._runtime.ahead([path for unit in adopted for path in self._scales(unit)])
        inside = units.inside(model)
        self._opaque: dict[str, set[str]] = {}
        for unit in split:
            leaves = units.leaves(unit, inside)
            self._values.put(leaves, "source")
            if unit.processed and self._layout(unit) == "runtime":
                self._opaque[unit.name] = {
                    path for path, leaf in leaves.items() if leaf.kind is Kind.OPAQUE
                }
                for key, tensor in source_parameters(unit).items():
                    if isinstance(tensor, nn.Parameter):
                        placeholders.fill(tensor, key)
                if self._is_adopted(unit):
                    adopt(unit, {path: read_scale(path) for path in self._scales(unit)})

    def after_processing(self, model: nn.Module, vllm_config: Any) -> None:
        """Put every remaining tensor and value in place, and account for all that the model reads."""
        self._check_choices(units.split(model), processed=True)
        faults = Faults()
        placed: set[str] = set()
        fills: list[tuple[str, torch.Tensor]] = []
        leaves_by_unit = list(units.all_leaves(model))
        for unit, leaves in leaves_by_unit:
            runtime = self._layout(unit) == "runtime"
            for path, leaf in leaves.items():
                if not leaf.is_tensor:
                    continue
                if path in self._late and self._late[path].replace:
                    placed.add(path)
                    if leaf.assign is None or isinstance(leaf.value, nn.Parameter):
                        faults.wrong.append(
                            f"{path}: another tensor was saved for it, a {leaf.kind}"
                        )
                elif path in self._late:
                    placed.add(path)
                    fills.append((path, leaf.value))
                    self._match(path, leaf.value, self._late, faults)
                elif runtime and path not in self._entry.values:  # else it was None when saved
                    faults.missing.append(path)
            if runtime and unit.processed:
                self._refuse_native(unit, leaves)
        modules = units.named_modules(model)
        added = {
            path: vacancy(modules, path, entry.owner)
            for path, entry in self._late.items()
            if path not in placed
        }
        faults.unexpected += [path for path, place in added.items() if place is None]
        faults.refuse(self._directory, self._strict)
        every = {path: leaf for _, leaves in leaves_by_unit for path, leaf in leaves.items()}
        self._runtime.fill(fills)
        replaced = [path for path, entry in self._late.items() if entry.replace and path in every]
        read = self._runtime.ahead([*replaced, *added])
        device = next((tensor.device for _, tensor in fills), torch.device("cpu"))
        remake(self._late, read, every, modules, device)
        for path in faults.missing:
            self._default(path, every[path].value)
        self._runtime.refuse_overwritten(fills)
        for _, leaves in leaves_by_unit:
            self._values.put(leaves, "runtime")
        self._values.add(modules, every.keys())
        self._mirror_defaults(modules)
        refuse_forged(modules, self._directory)
        self._check_kernels(modules, vllm_config)
        self._warn_defaults()
        self._progress.report()

    def _by_path(self, stage: str) -> dict[str, TensorEntry]:
        return {
            path: entry
            for name, entry in self._entry.tensors.items()
            if entry.stage == stage
            for path in (name.removesuffix(AGAIN), *entry.aliases)
        }

    def _check_files(self) -> None:
        """Every listed tensor is in its file, in the listed form, and no file holds another."""
        listed_keys: dict[str, set[str]] = {name: set() for name in self._entry.files}
        for entry in self._entry.tensors.values():
            listed_keys[entry.file].add(entry.key)
        faults = Faults()
        for file, keys in listed_keys.items():
            found = set(self._reader.keys(file)) - {STOCK_STOP}
            faults.missing += [f"{key} (in {file})" for key in keys - found]
            faults.unexpected += [f"{key} (in {file})" for key in found - keys]
        missing = set(faults.missing)
        present = {
            name: entry
            for name, entry in self._entry.tensors.items()
            if f"{entry.key} (in {entry.file})" not in missing
        }
        for name, entry in present.items():
            shape, dtype = self._reader.form(entry.file, entry.key)
            if (shape, dtype) != (entry.shape, entry.dtype):
                faults.wrong.append(
                    f"{name}: {entry.shape} {entry.dtype} was saved, {entry.file} has {shape} {dtype}"
                )
        faults.refuse(self._directory, self._strict)
        if missing:
            here = {id(entry) for entry in present.values()}
            for entries in (self._early, self._late):
                gone = [path for path, entry in entries.items() if id(entry) not in here]
                self._absent.update(gone)
                for path in gone:
                    del entries[path]

    def _bytes(self) -> int:
        return sum(
            math.prod(entry.shape) * NAMES.get(entry.dtype, 0)
            for entry in self._entry.tensors.values()
        )

    def _check_units(self, split: Iterable[Unit]) -> None:
        """Layouts were recorded for exactly the modules that this model has, by the same methods."""
        here = {unit.name: method_name(unit.root) if unit.processed else None for unit in split}
        saved = {name: unit.method for name, unit in self._entry.units.items()}
        different = [
            f"{name or '<model>'}: saved with {saved.get(name, 'nothing')}, here "
            f"{here.get(name, 'nothing')}"
            for name in sorted(saved.keys() | here.keys())
            if saved.get(name, "") != here.get(name, "")
        ]
        if different:
            raise MismatchError(
                f"{self._directory} was saved from a model with other modules:\n{listed(different)}\n"
                "Start the engine as it was when saving, or save again from this one."
            )

    def _check_choices(self, split: Iterable[Unit], processed: bool) -> None:
        """Units in runtime layout are run by the kernels that they were laid out for."""
        wrong = []
        for unit in split:
            saved = self._entry.units[unit.name]
            if unit.processed and saved.layout == "runtime":
                chosen = together(saved.choices, saved.processed) if processed else saved.choices
                wrong += [f"{unit.name}: {text}" for text in different(chosen, choices(unit))]
        if wrong:
            raise MismatchError(
                f"{self._directory} was saved for other kernels:\n{listed(wrong)}\n"
                "Start the engine as it was when saving, or save with layout=source (VSS_LAYOUT)."
            )

    def _layout(self, unit: Unit) -> str:
        return self._entry.units[unit.name].layout

    def _is_adopted(self, unit: Unit) -> bool:
        return unit.processed and self._layout(unit) == "runtime" and can_adopt(unit)

    def _scales(self, unit: Unit) -> list[str]:
        paths = [join(unit.name, name) for name in SCALE_BUFFERS]
        return [path for path in paths if path in self._late]

    def _match(
        self, path: str, tensor: torch.Tensor, entries: dict[str, TensorEntry], faults: Faults
    ) -> None:
        entry = entries.get(path)
        if entry is None:
            faults.missing.append(path)
            return
        dtype = dtype_name(tensor.dtype) if holds(tensor.dtype) else str(tensor.dtype)
        if entry.shape != list(tensor.shape) or entry.dtype != dtype:
            faults.wrong.append(
                f"{path}: {entry.shape} {entry.dtype} saved, {list(tensor.shape)} {dtype} here"
            )

    def _default(self, path: str, tensor: torch.Tensor) -> None:
        """The stated value of a missing tensor under `strict=false`: zeros, or 1.0 for a scale."""
        value = 1.0 if "scale" in path.rpartition(".")[2] else 0.0
        tensor.data.copy_(torch.full((), value, device=tensor.device).to(tensor.dtype))
        self._defaulted[path] = value

    def _refuse_native(self, unit: Unit, leaves: dict[str, Leaf]) -> None:
        made = [
            path
            for path, leaf in leaves.items()
            if leaf.kind is Kind.OPAQUE and path not in self._opaque[unit.name]
        ]
        if made:
            raise RestoreError(
                f"{unit.name} was saved in runtime layout, but here native code keeps a copy of its "
                f"weights, made of placeholders:\n{listed(made)}\n"
                "Save the model again on this machine, or in source layout."
            )

    def _check_kernels(self, modules: dict[str, nn.Module], vllm_config: Any) -> None:
        """What modules compute now is what they computed when they were saved, bit for bit."""
        device = torch.device(vllm_config.device_config.device)
        if (
            self._defaulted
            or self._absent
            or kernels.environment(device) != self._entry.kernel_environment
        ):
            logger.debug(
                "kernels are not compared: tensors were missing, or the machine is another"
            )
            return
        wrong = []
        for name, checksum in self._entry.kernels.items():
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
                f"Modules compute something else than when {self._directory} was saved, though all that "
                f"was saved of them is in place:\n{listed(wrong)}\n"
                "Some of their state lies where it can't be seen. Load the model's own checkpoint."
            )

    def _mirror_defaults(self, modules: dict[str, nn.Module]) -> None:
        """The mirrors of a KV scale that is missing were saved for another value than it has now."""
        for path in self._defaulted.keys() | self._absent:
            owner, _, name = path.rpartition(".")
            if name in SCALE_BUFFERS and owner in modules:
                adopt_loaded_scales(modules[owner])

    def _warn_defaults(self) -> None:
        lines = [f"{path} = {value}" for path, value in self._defaulted.items()]
        lines += [f"{path}: as a load makes it" for path in self._absent - self._defaulted.keys()]
        if lines:
            logger.warning(
                "%d tensors are missing in %s and were given values (strict is false):\n%s",
                len(lines),
                self._directory,
                "\n".join(f"  {line}" for line in sorted(lines)),
            )


def _origin(entry: TensorEntry) -> Origin:
    return entry.file, entry.key, entry.checksum
