"""Which elements of a tensor without memory were written, from the operations that wrote them."""

from typing import Any

import torch

#: Operations that write every element of their first argument.
_WHOLE = frozenset(
    {
        torch.ops.aten.copy_.default,
        torch.ops.aten.fill_.Scalar,
        torch.ops.aten.fill_.Tensor,
        torch.ops.aten.zero_.default,
    }
)

_Region = tuple[torch.Size, tuple[int, ...], int]


class Coverage:
    """The regions of one tensor (any shape and stride, on the meta device) that were written.

    written: elements written so far; those written again count again.
    at_once: whether a single write filled all of it, so that it says nothing about further ones.
    """

    def __init__(self, tensor: torch.Tensor) -> None:
        self._tensor = tensor
        self._regions: list[_Region] = []
        self._unclear = False
        self.written = 0
        self.at_once = False

    @property
    def wanted(self) -> int:
        """How many elements a checkpoint fills: all, unless the tensor's creator declared padding.

        `weight_loader_numel` is upstream's word for that
        (vllm/model_executor/model_loader/reload/utils.py, `get_tensor_load_numel`).
        """
        return int(getattr(self._tensor, "weight_loader_numel", self._tensor.numel()))

    def note(self, func: Any, target: torch.Tensor) -> None:
        """Note that `func` wrote `target`, a view of the tensor."""
        self.written += target.numel()
        if func not in _WHOLE or target.dtype != self._tensor.dtype:
            self._unclear = True  # may have written a part of the view, or only read it
            return
        self._regions.append((target.size(), target.stride(), target.storage_offset()))
        self.at_once |= target.numel() == self._tensor.numel()

    def is_whole(self) -> bool:
        """Whether every wanted element is known to have been written.

        False means that it is not known: something was not written, or not by an operation that shows
        what it writes.
        """
        return not self._unclear and self.written >= self.wanted and self._count() >= self.wanted

    def _count(self) -> int:
        spans = sorted(_span(region) or (-1, -1) for region in self._regions)
        if spans and spans[0][0] >= 0:
            count, end = 0, 0
            for first, last in spans:
                count += max(0, last - max(first, end))
                end = max(end, last)
            return count
        elements = self._tensor.untyped_storage().nbytes() // self._tensor.element_size()
        mask = torch.zeros(elements, dtype=torch.bool, device="cpu")
        for size, stride, offset in self._regions:
            mask.as_strided(size, stride, offset).fill_(True)
        return int(mask.count_nonzero())


def _span(region: _Region) -> tuple[int, int] | None:
    """First and last + 1 element in memory of a region without gaps; None for one with gaps."""
    size, stride, offset = region
    expected = 1
    for step, length in sorted(
        (step, length) for length, step in zip(size, stride, strict=True) if length != 1
    ):
        if step != expected:
            return None
        expected *= length
    return (offset, offset + expected)
