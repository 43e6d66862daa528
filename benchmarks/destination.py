"""The memory that is read into, or written from: the same for every contender.

One anonymous mapping, each tensor at a multiple of 64 bytes, as torch's allocator aligns them. Two
states: `fresh`, pages that were never touched, so that the kernel makes and clears each on the way
(what a loader finds in a model that was just built); `touched`, pages that are there (what a reload
finds).
"""

import mmap
import weakref
from collections.abc import Iterator
from contextlib import contextmanager

import torch

from .inputs import DTYPES, Input

ALIGNMENT = 64
STATES = ("touched", "fresh")


@contextmanager
def destination(given: Input, state: str) -> Iterator[dict[str, torch.Tensor]]:
    """Tensors in the forms of `given`, by key, with contents that are not those of the file."""
    offsets, end = {}, 0
    for key, tensor in given.tensors.items():
        offsets[key] = end
        end += -(-tensor.size // ALIGNMENT) * ALIGNMENT
    memory = mmap.mmap(-1, max(end, 1), flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    whole = torch.frombuffer(memory, dtype=torch.uint8)
    if state == "touched":
        whole.fill_(0xA5)
    elif state != "fresh":
        raise ValueError(f"the state of a destination is {state!r}: one of {', '.join(STATES)}")
    # A storage for each, as in a model: stock's loop looks for tensors that share one.
    tensors = {
        key: torch.frombuffer(
            memory, dtype=DTYPES[form.dtype], count=form.count, offset=offsets[key]
        ).view(form.shape)
        for key, form in given.tensors.items()
    }
    kept = weakref.ref(memory)
    del whole, memory
    yield tensors
    tensors.clear()
    if kept() is not None:
        raise RuntimeError("a contender still holds a tensor that it was given to fill")
