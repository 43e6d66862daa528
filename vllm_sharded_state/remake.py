"""Make the tensors that a load does not create, or creates in another form, as they were when saved."""

from collections.abc import Callable, Mapping

import torch
from torch import nn

from .checkpoint.manifest import TensorEntry
from .errors import RestoreError
from .state import sharing
from .state.kernels import same_bits
from .state.walk import Leaf


def remake(
    entries: Mapping[str, TensorEntry],
    read: Callable[[str], torch.Tensor],
    leaves: Mapping[str, Leaf],
    modules: Mapping[str, nn.Module],
    device: torch.device,
) -> None:
    """Put the tensors in `entries`, by path, in the place of what `leaves` has there or lacks.

    `read` gives the saved elements of a path. Those of another form replace what is there; those that
    are not there become attributes of their owner, on `device`. `entries` are in the order in which they
    were saved, so that each comes after the one whose memory it lies in; all else is filled already.

    Raises `RestoreError`.
    """
    there = {path: leaf.value for path, leaf in leaves.items()}
    for path, entry in entries.items():
        leaf = leaves.get(path)
        if leaf is not None and entry.replace and leaf.assign is not None:
            there[path] = _make(path, entry, read(path), there, leaf.value.device)
            leaf.assign(there[path])
        elif leaf is None and entry.owner is not None:
            there[path] = _make(path, entry, read(path), there, device)
            name = path.removeprefix(entry.owner).removeprefix(".")
            setattr(modules[entry.owner], name, there[path])


def _make(
    path: str,
    entry: TensorEntry,
    values: torch.Tensor,
    there: Mapping[str, object],
    device: torch.device,
) -> torch.Tensor:
    """A tensor in its own memory, or in that of the one it was a view of."""
    try:
        if entry.base is None:
            return sharing.restored(values, entry.stride, device)
        base = there.get(entry.base)
        if not isinstance(base, torch.Tensor):
            raise RuntimeError(f"there is no tensor {entry.base}, in whose memory it lay")
        made = sharing.view(base, entry.offset, values.dtype, entry.shape, entry.stride)
    except (RuntimeError, ValueError) as error:  # as torch says what a form can't be
        raise RestoreError(
            f"{path} can't be made as it was saved: {error}.\n"
            "Save the model again with this version of vLLM."
        ) from error
    if not same_bits(made, values):
        raise RestoreError(
            f"{path} lay in the memory of {entry.base}, which holds other values here.\n"
            "Save the model again with this version of vLLM."
        )
    return made
