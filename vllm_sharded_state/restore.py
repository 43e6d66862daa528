"""Put a saved rank back into a model: source tensors before upstream processes it, the rest after.

Every tensor that the model reads has to be in the checkpoint, and every tensor of the checkpoint has
to find its place; names, shapes and dtypes are compared before anything is copied.
"""

from typing import Any

import torch
from torch import nn
from vllm.logger import init_logger

from .adopt import adopt, can_adopt
from .errors import RestoreError, listed
from .faults import Faults
from .mirrors import refuse_forged
from .progress import Progress
from .remake import remake
from .saved_rank import SavedRank
from .state import placeholders, units
from .state.kv_scales import SCALE_BUFFERS, adopt_loaded_scales
from .state.twin import source_parameters
from .state.units import Unit
from .state.walk import Kind, Leaf, join
from .values import vacancy

logger = init_logger("vllm.sharded_state.restore")


class Restorer:
    """Restores what one rank saved; `use_tqdm` is the engine's `use_tqdm_on_load`."""

    def __init__(self, saved: SavedRank, use_tqdm: bool = True) -> None:
        self._saved = saved
        self._directory = saved.directory
        self._strict = saved.strict
        self._values = saved.values
        self._defaulted: dict[str, float] = {}
        self._early, self._late = saved.early, saved.late
        self._progress = Progress(saved.nbytes, use_tqdm)
        self._source = saved.filling(self._early, self._progress)
        self._runtime = saved.filling(self._late, self._progress)

    def close(self) -> None:
        """Close the files, and take the progress bar away."""
        self._progress.close()
        self._saved.reader.close()

    def before_processing(self, model: nn.Module) -> None:
        """Fill source units, and give runtime units placeholders to be processed in their stead."""
        split = units.split(model)
        self._saved.refuse_other_units(split)
        self._saved.refuse_other_choices(split, processed=False)
        fills: list[tuple[str, torch.Tensor]] = []
        faults = Faults()
        expected: set[str] = set()
        for unit in split:
            if self._saved.layout(unit) == "source":
                for key, tensor in source_parameters(unit).items():
                    expected.add(key)
                    fills.append((key, tensor))
                    self._saved.match(key, tensor, self._early, faults)
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
            if unit.processed and self._saved.layout(unit) == "runtime":
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
        self._saved.refuse_other_choices(units.split(model), processed=True)
        faults = Faults()
        placed: set[str] = set()
        fills: list[tuple[str, torch.Tensor]] = []
        leaves_by_unit = list(units.all_leaves(model))
        values = self._saved.entry.values
        for unit, leaves in leaves_by_unit:
            runtime = self._saved.layout(unit) == "runtime"
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
                    self._saved.match(path, leaf.value, self._late, faults)
                elif runtime and path not in values:  # else it was None when saved
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

    def _is_adopted(self, unit: Unit) -> bool:
        return unit.processed and self._saved.layout(unit) == "runtime" and can_adopt(unit)

    def _scales(self, unit: Unit) -> list[str]:
        paths = [join(unit.name, name) for name in SCALE_BUFFERS]
        return [path for path in paths if path in self._late]

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
        if self._defaulted or self._saved.absent:
            logger.debug("kernels are not compared: tensors were missing")
            return
        self._saved.refuse_other_results(modules, vllm_config, self._saved.entry.kernels)

    def _mirror_defaults(self, modules: dict[str, nn.Module]) -> None:
        """The mirrors of a KV scale that is missing were saved for another value than it has now."""
        for path in self._defaulted.keys() | self._saved.absent:
            owner, _, name = path.rpartition(".")
            if name in SCALE_BUFFERS and owner in modules:
                adopt_loaded_scales(modules[owner])

    def _warn_defaults(self) -> None:
        lines = [f"{path} = {value}" for path, value in self._defaulted.items()]
        undone = self._saved.absent - self._defaulted.keys()
        lines += [f"{path}: as a load makes it" for path in undone]
        if lines:
            logger.warning(
                "%d tensors are missing in %s and were given values (strict is false):\n%s",
                len(lines),
                self._directory,
                "\n".join(f"  {line}" for line in sorted(lines)),
            )
