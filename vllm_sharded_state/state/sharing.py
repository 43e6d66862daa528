"""Tensors that a load does not create: their strides, and the memory that they share with others.

What a load creates has the form and the neighbours that the model's own code gives it. The rest, set by
hand or by a first run, is made anew from its bytes, so both have to be written down.
"""

from collections.abc import Iterable
from dataclasses import dataclass

import torch

from vllm_sharded_state.checkpoint.memory import span
from vllm_sharded_state.errors import NotRepresentableError, listed

from .walk import Kind, Leaf


@dataclass(frozen=True)
class View:
    """Where a tensor lies in the memory of another: `offset` bytes behind the first one of `base`."""

    base: str
    offset: int


def stride(tensor: torch.Tensor) -> list[int] | None:
    """The strides of `tensor` in elements; None where it is contiguous."""
    return None if tensor.is_contiguous() else list(tensor.stride())


def restored(values: torch.Tensor, strides: list[int] | None, device: torch.device) -> torch.Tensor:
    """A new tensor on `device` with the elements of `values` and the given strides.

    Raises `RuntimeError` when there is no memory for what the strides span.
    """
    if strides is None:
        return values.to(device, copy=True, memory_format=torch.contiguous_format)
    made = torch.empty_strided(values.shape, strides, dtype=values.dtype, device=device)
    target = made
    for dim, (size, step) in enumerate(zip(values.shape, strides, strict=True)):
        if size > 1 and step == 0:  # repeated elements are written once
            target, values = target.narrow(dim, 0, 1), values.narrow(dim, 0, 1)
    target.copy_(values)
    return made


def view(
    base: torch.Tensor, offset: int, dtype: torch.dtype, shape: list[int], strides: list[int] | None
) -> torch.Tensor:
    """The tensor of the given form that lies `offset` bytes behind the first element of `base`.

    Raises `RuntimeError` when it does not lie within the memory of `base`.
    """
    storage = base.untyped_storage()
    start = base.data_ptr() - storage.data_ptr() + offset
    empty = torch.empty(0, dtype=dtype, device=base.device)
    if start % empty.element_size():
        raise RuntimeError(f"{offset} bytes are no whole number of elements of {dtype}")
    form = strides or torch.empty(shape, device="meta").stride()
    size = 1 + sum((n - 1) * step for n, step in zip(shape, form, strict=True))
    if start + size * empty.element_size() > storage.nbytes():
        raise RuntimeError("it would end behind the memory of the other")
    return empty.set_(storage, start // empty.element_size(), shape, form)


def arrange(free: Iterable[Leaf], every: Iterable[Leaf]) -> list[tuple[Leaf, View | None]]:
    """The tensors in `free`, which a load does not create, in an order in which they can be made.

    Each comes with its place in another of the tensors in `every`, where it shares memory with one: one
    that a load creates, or one that comes before it. Raises `NotRepresentableError` naming those whose
    own elements overlap, and those that share memory with another of which they are no part.
    """
    pending = sorted(free, key=lambda leaf: (-_size(leaf.value), leaf.path))
    paths = {leaf.path for leaf in pending}
    neighbours: dict[tuple[torch.device, int], list[Leaf]] = {}
    for leaf in every:
        strided = leaf.is_tensor and leaf.kind is not Kind.OPAQUE  # sparse ones have no storage
        if strided and leaf.value.numel() and leaf.path not in paths:
            neighbours.setdefault(_storage(leaf.value), []).append(leaf)
    arranged: list[tuple[Leaf, View | None]] = []
    problems = []
    for leaf in pending:
        if not leaf.value.numel():
            arranged.append((leaf, None))
            continue
        if _overlaps_itself(leaf.value):
            problems.append(f"{leaf.path}: several of its elements lie at one place in memory")
        near = neighbours.setdefault(_storage(leaf.value), [])
        start, end = span(leaf.value)
        touching = [other for other in near if _meet(leaf.value, other.value)]
        around = [
            other
            for other in touching
            if span(other.value)[0] <= start and end <= span(other.value)[1]
        ]
        problems += [
            f"{leaf.path}: shares a part of its memory with {other.path}"
            for other in touching
            if other not in around
        ]
        base = min(around, key=lambda other: (other.path in paths, other.path), default=None)
        place = None if base is None else View(base.path, start - span(base.value)[0])
        arranged.append((leaf, place))
        near.append(leaf)
    if problems:
        raise NotRepresentableError(
            "Tensors that a load does not create can't come back as they lie in memory:\n"
            f"{listed(problems)}\nGive each its own memory (`clone()`), and save again."
        )
    return arranged


def _storage(tensor: torch.Tensor) -> tuple[torch.device, int]:
    return tensor.device, tensor.untyped_storage().data_ptr()


def _size(tensor: torch.Tensor) -> int:
    start, end = span(tensor)
    return end - start


def _meet(one: torch.Tensor, other: torch.Tensor) -> bool:
    """Whether two tensors of one storage have a byte in common, not just interleaved ones."""
    spans = span(one), span(other)
    start, end = max(span[0] for span in spans), min(span[1] for span in spans)
    if start >= end:
        return False
    if one.is_contiguous() and other.is_contiguous():
        return True
    first = min(span[0] for span in spans)
    used = torch.zeros(max(span[1] for span in spans) - first, dtype=torch.bool)
    _bytes(used, one, first).fill_(True)
    return bool(_bytes(used, other, first).any())


def _bytes(memory: torch.Tensor, tensor: torch.Tensor, first: int) -> torch.Tensor:
    """The bytes of `tensor` in a map of the memory that begins at the address `first`."""
    size = tensor.element_size()
    strides = [step * size for step in tensor.stride()]
    shape = [*tensor.shape, size]
    for dim, step in enumerate(strides):
        if step == 0:
            shape[dim] = 1
    return memory.as_strided(shape, [*strides, 1], tensor.data_ptr() - first)


def _overlaps_itself(tensor: torch.Tensor) -> bool:
    """Whether elements lie at one place, other than by repeating whole dimensions (stride 0)."""
    reach = 0
    for step, size in sorted(zip(tensor.stride(), tensor.shape, strict=True)):
        if size > 1 and step > 0:
            if step <= reach:
                return True
            reach += (size - 1) * step
    return False
