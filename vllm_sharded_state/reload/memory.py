"""Where the sender's tensors lie, which are read later than they come: some memory can't be trusted.

A tensor is kept as it came until its layer is whole. If its sender uses the memory again before that,
for another tensor, or if it is the running model's own, which changes meanwhile, then what is read is
something else than what was sent.
"""

import bisect
from collections.abc import Callable

import torch
from torch import nn

from vllm_sharded_state.checkpoint.memory import span
from vllm_sharded_state.errors import ReloadSourceError, shown

#: First and last byte (exclusive) of a tensor, and the name that it was sent under.
Span = tuple[int, int, str]


def refuse_formless(name: object, tensor: object) -> None:
    """Raise `ReloadSourceError` unless this is a name with a tensor that has elements to read."""
    if not isinstance(name, str) or not isinstance(tensor, torch.Tensor):
        kinds = f"{type(name).__name__} and {type(tensor).__name__}"
        raise ReloadSourceError(
            f"The new weights hold a pair of {kinds}, not a name with a tensor."
        )
    if tensor.is_meta or tensor.layout != torch.strided:
        what = "is on the meta device" if tensor.is_meta else f"has layout {tensor.layout}"
        raise ReloadSourceError(f"{shown(name)} {what}. Send a dense tensor with its elements.")


def storages(model: nn.Module) -> set[int]:
    """The addresses of all memory that parameters and buffers of `model` lie in."""
    tensors = (*model.parameters(), *model.buffers())
    return {t.untyped_storage().data_ptr() for t in tensors if t.numel() and not t.is_meta}


def refuse_live(name: str, tensor: torch.Tensor, live: set[int]) -> None:
    """Raise `ReloadSourceError` for a tensor in the running model's own memory (`storages` of it)."""
    if tensor.numel() and tensor.untyped_storage().data_ptr() in live:
        raise ReloadSourceError(
            f"{name} lies in the running model's own memory, which changes meanwhile. Send a copy."
        )


class SenderMemory:
    """The memory of what was sent and is still to be read; `is_held` tells whether a name is."""

    def __init__(self, is_held: Callable[[str], bool]) -> None:
        self._is_held = is_held
        self._spans: dict[torch.device, list[Span]] = {}

    def take(self, name: str, tensor: torch.Tensor) -> None:
        """Note where `tensor` lies, which was sent as `name`.

        Raises `ReloadSourceError` where another tensor lies there that is still to be read.
        """
        if not tensor.numel():
            return
        start, end = span(tensor)
        spans = self._spans.setdefault(tensor.device, [])
        place = bisect.bisect_left(spans, (start,))
        if place and spans[place - 1][1] > start:
            place -= 1
        while place < len(spans) and spans[place][0] < end:
            other = spans[place][2]
            if self._is_held(other):
                raise ReloadSourceError(
                    f"{name} came in the memory that {other} came in, whose layer is not whole yet: it "
                    "was overwritten.\nSend each tensor in memory of its own, or layer by layer."
                )
            del spans[place]
        spans.insert(place, (start, end, name))

    def forget(self) -> None:
        """What is still to be read has been copied: the sender may use its memory again."""
        self._spans.clear()
