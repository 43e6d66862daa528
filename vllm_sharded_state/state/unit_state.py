"""What is saved of one unit, and where source tensors come from."""

from dataclasses import dataclass, field
from typing import Protocol

import torch

from .choices import Choices
from .units import Unit
from .walk import Leaf

#: Source tensors by `state_dict()` key.
Tensors = dict[str, torch.Tensor]


class Source(Protocol):
    """Where source tensors can be read again (`SourceReader`, or a saved directory)."""

    def side_effects(self, unit: str) -> dict[str, object]:
        """Python values, by path, that loading leaves on the unit's modules before processing."""

    def read(self, unit: str, device: torch.device) -> tuple[dict[str, torch.Tensor], list[str]]:
        """The unit's source tensors by key, and the keys that were not filled completely."""


@dataclass
class UnitState:
    """What is saved of one unit.

    source: tensors placed before processing, by `state_dict()` key (empty in runtime layout).
    before: Python values, by path, that are set before processing.
    overlay: live leaves that are put back after processing.
    replaced: paths in the overlay whose tensor takes the place of one of another form.
    added: paths in the overlay of tensors that a load does not create.
    method: class of the quantization method, as the constructor chose it.
    choices: what that method had chosen when it was constructed; `processed` what changed afterwards
        (in runtime layout).
    kernels: checksums of what the live kernels give, by module (see `kernels.digest`).
    """

    unit: Unit
    layout: str
    source: dict[str, torch.Tensor] = field(default_factory=dict)
    before: dict[str, object] = field(default_factory=dict)
    overlay: list[Leaf] = field(default_factory=list)
    replaced: frozenset[str] = frozenset()
    added: frozenset[str] = frozenset()
    method: str | None = None
    choices: Choices = field(default_factory=dict)
    processed: Choices = field(default_factory=dict)
    kernels: dict[str, str] = field(default_factory=dict)

    @property
    def is_whole_in_source(self) -> bool:
        """Whether its source tensors are all that a load needs, upstream's own included."""
        return self.layout == "source" and not (self.overlay or self.before)


def method_name(module: torch.nn.Module) -> str | None:
    """The class of the quantization method of `module`, or None."""
    method = getattr(module, "quant_method", None)
    return None if method is None else f"{type(method).__module__}.{type(method).__qualname__}"


def title(unit: Unit) -> str:
    """The unit as errors name it: its path, class and quantization method."""
    method = getattr(unit.root, "quant_method", None)
    kind = type(unit.root).__name__
    return f"{unit.name} ({kind}{f', {type(method).__name__}' if method is not None else ''})"
