"""The host memory that tensors lie in, as the kernel sees it."""

from typing import Any

import torch


def raw(tensor: torch.Tensor) -> torch.Tensor:
    """The bytes of a contiguous tensor, as a tensor of uint8 in the same memory."""
    # Not `view(-1)`: a dimension of one element may have any stride, and would keep it.
    return tensor.as_strided((tensor.numel(),), (1,)).view(torch.uint8)


def flat(tensor: torch.Tensor) -> Any:
    """The bytes of a contiguous host tensor as a writable array of uint8, without a copy."""
    return raw(tensor).numpy()
