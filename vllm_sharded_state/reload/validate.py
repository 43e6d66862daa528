"""What may be loaded where: dtypes, and the values of scales."""

import torch

from vllm_sharded_state.errors import ReloadScaleError
from vllm_sharded_state.state.compare import describe

#: Floating dtypes that a weight loader may convert into each other, as it does on a cold load.
_WIDE = frozenset({torch.float64, torch.float32, torch.bfloat16, torch.float16})


def may_become(sent: torch.dtype, wanted: torch.dtype) -> bool:
    """Whether a tensor of dtype `sent` may be loaded into a parameter of dtype `wanted`."""
    if sent == wanted or (sent in _WIDE and wanted in _WIDE):
        return True
    whole = not (sent.is_floating_point or wanted.is_floating_point)
    if whole and torch.bool not in (sent, wanted):
        return True
    # One byte read as another: exponents of scales are stored as integers.
    return {sent, wanted} == {torch.uint8, torch.float8_e8m0fnu}


def refuse_bad_scale(tensor: torch.Tensor, name: str) -> None:
    """A scale of one element has to be positive; of several, some may belong to nothing but zeros."""
    if tensor.dtype not in _WIDE:
        return
    refuse_bad_values(tensor, name, zero=tensor.numel() > 1)


def refuse_bad_values(tensor: torch.Tensor, name: str, zero: bool) -> None:
    """Raise `ReloadScaleError` unless all elements are finite and positive (or zero, if `zero`)."""
    bad = ~torch.isfinite(tensor) | (tensor < 0 if zero else tensor <= 0)
    if bool(bad.any()):
        value = tensor[bad].flatten()[0].item() if tensor.dim() else tensor.item()
        raise ReloadScaleError(
            f"{name} holds {value}; a scale has to be finite and positive. ({describe(tensor)})"
        )
