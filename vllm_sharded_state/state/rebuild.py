"""Rebuild a unit as a load would: a twin, filled and processed, to be compared with the live one."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass

import torch

from . import placeholders, plain
from .compare import compare, same_form
from .process import process
from .twin import Twin, TwinPool, discard, materialize, source_parameters
from .units import Unit
from .walk import Kind, Leaf

#: Fills one tensor of a unit, given its `state_dict()` key.
Fill = Callable[[str, torch.Tensor], None]


@dataclass
class Rebuilt:
    """A processed twin of a unit.

    leaves: what it holds. constructed: what it held before it was filled and processed.
    """

    twin: Twin
    unit: Unit
    leaves: dict[str, Leaf]
    constructed: dict[str, Leaf]

    @property
    def opaque(self) -> frozenset[str]:
        """Leaves that were opaque before it was processed: locks, streams and the like."""
        return opaque_paths(self.constructed)

    def made(self, leaf: Leaf) -> bool:
        """Whether processing made the Python value `leaf`, rather than the constructor."""
        before = self.constructed.get(leaf.path)
        return before is None or before.is_tensor or not plain.equal(before.value, leaf.value)

    def discard(self) -> None:
        """Give its memory back."""
        self.leaves, self.constructed = {}, {}
        discard(self.unit)

    def put_back(self, overlay: list[Leaf]) -> None:
        """Put live leaves in their places: tensors are filled in place where they fit, else assigned."""
        for leaf in overlay:
            place = self.leaves.get(leaf.path)
            filled = leaf.is_tensor and place is not None and place.is_tensor
            if filled and place is not None and same_form(leaf.value, place.value):
                place.value.data.copy_(leaf.value)
                continue
            value = leaf.value.detach().clone() if leaf.is_tensor else leaf.value
            if place is not None and place.assign is not None:
                place.assign(value)
            elif place is None and leaf.attribute is not None:
                setattr(self.unit.modules[leaf.owner], leaf.attribute, value)
        self.leaves = self.twin.leaves(self.unit)


def rebuild(
    pool: TwinPool,
    name: str,
    device: torch.device,
    fill: Fill,
    constants: Mapping[str, torch.Tensor],
    before: Mapping[str, object] | None = None,
) -> Rebuilt:
    """Take an unused twin of the unit `name`, fill it, set the values in `before`, and process it.

    `constants` gives buffers and hidden tensors the values that a constructor gives them. Raises
    whatever processing raises.
    """
    twin = pool.unused(name)
    leaves = twin.leaves(twin.units[name])
    copy = twin.take(name)
    materialize(copy, leaves, device, constants)
    for key, tensor in source_parameters(copy).items():
        fill(key, tensor)
    for path, value in (before or {}).items():
        assign = leaves[path].assign
        if assign is not None:
            assign(value)
    process(copy, twin.vllm_config, device)
    return Rebuilt(twin, copy, twin.leaves(copy), leaves)


def with_placeholders(key: str, tensor: torch.Tensor) -> None:
    """A `Fill` for rehearsals: weights get placeholders, buffers keep what the constructor gave."""
    if isinstance(tensor, torch.nn.Parameter):
        placeholders.fill(tensor, key)


def opaque_paths(leaves: Mapping[str, Leaf]) -> frozenset[str]:
    """The paths of opaque leaves."""
    return frozenset(path for path, leaf in leaves.items() if leaf.kind is Kind.OPAQUE)


def volatile_paths(first: Rebuilt, second: Rebuilt) -> set[str]:
    """Leaves that differ between two equal rebuilds: addresses, indices, counters."""
    difference = compare(first.leaves, second.leaves, first.opaque, bytes_matter=True)
    return {leaf.path for leaf in difference.overlay} | set(difference.captured)
