"""Make the tensors that a load does not create, or creates in another form, as they were when saved."""

from collections.abc import Callable, Mapping

import torch
from torch import nn

from .checkpoint.manifest import TensorEntry
from .errors import RestoreError, listed
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
    are not there become attributes of their owner, on `device`. All else has to be filled already.

    Raises `RestoreError`.
    """
    made: dict[str, torch.Tensor] = {}
    waiting = {
        path: entry
        for path, entry in entries.items()
        if (entry.replace if path in leaves else entry.owner is not None)
    }
    while waiting:
        ready = [path for path, entry in waiting.items() if entry.base not in waiting]
        if not ready:
            raise RestoreError(
                f"Each of these is said to lie in the memory of another:\n{listed(waiting)}\n"
                "The manifest was changed. Save the model again."
            )
        for path in ready:
            entry, leaf = waiting.pop(path), leaves.get(path)
            base: object = None
            if entry.base is not None:
                other = leaves.get(entry.base)
                base = made.get(entry.base, None if other is None else other.value)
            where = device if leaf is None else leaf.value.device
            made[path] = _make(path, entry, read(path), base, where)
            if leaf is None:
                assert entry.owner is not None
                name = path.removeprefix(entry.owner).removeprefix(".")
                setattr(modules[entry.owner], name, made[path])
            elif leaf.assign is not None:
                leaf.assign(made[path])


def _make(
    path: str,
    entry: TensorEntry,
    values: torch.Tensor,
    base: object,
    device: torch.device,
) -> torch.Tensor:
    """A tensor in its own memory, or in that of the one it was a view of."""
    try:
        if entry.base is None:
            return sharing.restored(values, entry.stride, device)
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
