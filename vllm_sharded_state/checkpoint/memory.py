"""The memory that tensors lie in: their bytes, and pieces of them."""

from collections.abc import Iterator
from typing import Any

import torch


def raw(tensor: torch.Tensor) -> torch.Tensor:
    """The bytes of a contiguous tensor, as a tensor of uint8 in the same memory."""
    # Not `view(-1)`: a dimension of one element may have any stride, and would keep it.
    return tensor.as_strided((tensor.numel(),), (1,)).view(torch.uint8)


def flat(tensor: torch.Tensor) -> Any:
    """The bytes of a contiguous host tensor as a writable array of uint8, without a copy."""
    return raw(tensor).numpy()


def span(tensor: torch.Tensor) -> tuple[int, int]:
    """First and last byte, exclusive, of the memory in which the elements of `tensor` lie."""
    start = tensor.data_ptr()
    if tensor.is_contiguous():
        return start, start + tensor.nbytes
    last = sum((n - 1) * step for n, step in zip(tensor.shape, tensor.stride(), strict=True))
    return start, start + (last + 1) * tensor.element_size()


def slabs(tensor: torch.Tensor, limit: int) -> Iterator[torch.Tensor]:
    """Views of `tensor` of at most `limit` bytes, which follow each other in row-major order.

    `limit` is at least the size of one element.
    """
    if tensor.is_contiguous():
        yield from tensor.view(-1).split(limit // tensor.element_size())
    elif tensor.nbytes <= limit:
        yield tensor
    elif (row := tensor.nbytes // tensor.shape[0]) <= limit:
        yield from tensor.split(limit // row)
    else:
        for part in tensor:
            yield from slabs(part, limit)
