"""What processing makes of a unit's tensors, seen by processing placeholders twice."""

from dataclasses import dataclass
from typing import Any

import torch

from . import kernels, placeholders
from .compare import compare, place
from .kernels import same_bits
from .rebuild import Rebuilt, rebuild
from .twin import TwinPool
from .units import Unit
from .walk import Leaf


@dataclass(frozen=True)
class Rehearsal:
    """The effect of processing on one unit.

    is_identity: each source tensor keeps its name, form and bytes (a copy may have been captured).
    tensors: what `state_dict()` shows afterwards, by key.
    derived: leaves outside of `state_dict()` that depend on the weights.
    captured: leaves owned by native code that processing created.
    """

    is_identity: bool
    tensors: dict[str, torch.Tensor]
    derived: list[str]
    captured: list[str]


def rehearse(pool: TwinPool, unit: Unit, vllm_config: Any, device: torch.device) -> Rehearsal:
    """Process two twins of `unit`, filled with different placeholders, and compare them.

    Raises whatever processing placeholders raises.
    """
    first, filled = _processed(pool, unit, device, seed=0)
    # Before the second is processed, which could change what the first one's kernel reads.
    results = _results(first, vllm_config, device)
    second, _ = _processed(pool, unit, device, seed=1)
    difference = compare(first.leaves, second.leaves, first.opaque, bytes_matter=True)
    shown = {path: leaf.value for path, leaf in first.leaves.items() if leaf.in_state_dict}
    places = {place(tensor) for tensor in shown.values() if tensor.numel()}

    def shows(leaf: Leaf) -> bool:
        return leaf.path in shown or (leaf.is_tensor and place(leaf.value) in places)

    derived = [leaf.path for leaf in difference.overlay if not shows(leaf)] + difference.unfit
    second.put_back([leaf for leaf in first.leaves.values() if leaf.in_state_dict])
    derived += [
        f"{name}: what its kernel reads"
        for name, result in _results(second, vllm_config, device).items()
        if result != results[name]
    ]
    return Rehearsal(
        is_identity=shown.keys() == filled.keys()
        and all(same_bits(shown[key], filled[key]) for key in filled),
        tensors=shown,
        derived=derived,
        captured=difference.captured,
    )


def _results(rebuilt: Rebuilt, vllm_config: Any, device: torch.device) -> dict[str, str]:
    return {
        name: kernels.digest(module, vllm_config, device)
        for name, module in rebuilt.unit.modules.items()
        if kernels.has_kernel(module)
    }


def _processed(
    pool: TwinPool, unit: Unit, device: torch.device, seed: int
) -> tuple[Rebuilt, dict[str, torch.Tensor]]:
    """A processed twin, and what it was filled with: buffers too, since processing may reset them."""
    filled: dict[str, torch.Tensor] = {}

    def fill(key: str, tensor: torch.Tensor) -> None:
        placeholders.fill(tensor, key, seed)
        filled[key] = tensor.detach().clone()

    return rebuild(pool, unit.name, device, fill, {}), filled
