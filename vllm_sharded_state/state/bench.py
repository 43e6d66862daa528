"""The bench on which layouts are tried out: units rebuilt on a twin, and kernels run beside live ones."""

from collections import ChainMap
from typing import Any

import torch

from . import kernels
from .compare import Difference
from .rebuild import Fill, Rebuilt, rebuild
from .twin import TwinPool, source_parameters
from .units import Unit
from .walk import Leaf

#: Checksums of what kernels give, by module; None where one can't be run by itself.
Results = dict[str, str | None]


class Bench:
    """Rebuilds units of a live model, on `device`, from tensors that a trial fills in.

    `initial` holds the tensors that the model's constructor computed, by path.
    """

    def __init__(
        self, vllm_config: Any, device: torch.device, initial: dict[str, torch.Tensor], prefix: str
    ) -> None:
        self.device = device
        self.initial = initial
        self._config = vllm_config
        self._pool = TwinPool(vllm_config, device, prefix)

    def unused(self, name: str) -> Unit:
        """The unit `name` of a twin that nothing has processed."""
        return self._pool.unused(name).units[name]

    def unused_leaves(self, unit: Unit) -> dict[str, Leaf]:
        """What `unit` reaches before anything is loaded, on the meta device."""
        twin = self._pool.unused(unit.name)
        return twin.leaves(twin.units[unit.name])

    def declared(self, unit: Unit) -> dict[str, torch.Tensor]:
        """The source tensors of `unit` by key, on the meta device."""
        return source_parameters(self.unused(unit.name))

    def rebuild(
        self,
        unit: Unit,
        live: dict[str, Leaf],
        fill: Fill,
        before: dict[str, object] | None = None,
    ) -> Rebuilt:
        """A copy of `unit`, filled and processed; the caller discards it. Raises what processing does."""
        own = {p: leaf.value for p, leaf in live.items() if leaf.is_tensor}
        constants = ChainMap(self.initial, own)  # not merged: `initial` is of the whole model
        return rebuild(self._pool, unit.name, self.device, fill, constants, before)

    def results(self, unit: Unit) -> Results:
        """What the kernels of `unit` give for fixed inputs."""
        return kernels.results(unit.modules, self._config, self.device)

    def mismatches(self, results: Results, other: Rebuilt) -> list[str]:
        """Modules whose kernels give something else in `other`."""
        rebuilt = self.results(other.unit)
        return [
            f"{name}: its kernel gives another result"
            for name, result in results.items()
            if rebuilt[name] != result
        ]


def paths(leaves: list[Leaf]) -> frozenset[str]:
    """The paths of `leaves`."""
    return frozenset(leaf.path for leaf in leaves)


def may_be_handles(difference: Difference) -> bool:
    """Whether something differs that could be an index into what native code or a registry keeps."""
    return bool(difference.values) or any(leaf.value.numel() <= 8 for leaf in difference.tensors)


def line(error: BaseException) -> str:
    """An error in one line."""
    text = str(error).strip().splitlines()
    return f"{type(error).__name__}: {text[0] if text else ''}"
