"""Values to rehearse with: finite, another for each tensor and element, and positive with seed 0.

Some methods assert that a scale is neither zero nor NaN, or that fused shards agree; some transpose a
square weight, which equal elements would hide. The values depend on the tensor's name alone, so that
a rehearsal while saving and one while loading give the same; another seed gives others.
"""

import zlib

import torch

_PERIOD = 61  # prime, so that rows of any usual width differ
_REPEATS = 1024  # periods in a block, which stays in the processor's cache


def fill(tensor: torch.Tensor, name: str, seed: int = 0) -> None:
    """Fill `tensor` (any shape, stride, dtype) in place; the values depend on `name` and `seed`."""
    if tensor.numel() == 0:
        return
    offset = zlib.crc32(f"{seed}{name}".encode()) % _PERIOD
    ramp = (torch.arange(min(tensor.numel(), _PERIOD), device=tensor.device) + offset) % _PERIOD
    if tensor.dtype == torch.bool:
        values = ramp % 2 == 0
    elif not tensor.dtype.is_floating_point and not tensor.dtype.is_complex:
        values = (ramp % 7 + 1).to(tensor.dtype)
    elif tensor.element_size() == 1:
        # eight-bit floats have no arithmetic: 2**k is exact in each of them
        steps = torch.tensor([0.5, 1.0, 2.0, 4.0], dtype=torch.float32, device=tensor.device)
        values = steps[ramp % 4].to(tensor.dtype)
    else:
        # in float32 whatever the default dtype is, which differs between saving and loading
        values = 0.5 + ramp.to(torch.float32) / _PERIOD
        if seed and "scale" not in name.rpartition(".")[2]:
            values = 16 * values * (1 - 2 * (ramp % 2))  # other signs and magnitudes
        values = values.to(tensor.dtype)
    if tensor.numel() <= _PERIOD:
        tensor.data.copy_(values.view(tensor.shape))
        return
    if tensor.is_contiguous():
        _repeat(values, tensor.data.view(-1))
        return
    flat = torch.empty(tensor.numel(), dtype=tensor.dtype, device=tensor.device)
    _repeat(values, flat)
    tensor.data.copy_(flat.view(tensor.shape))


def _repeat(values: torch.Tensor, flat: torch.Tensor) -> None:
    """Fill `flat` with `values` again and again, block by block: no second tensor of its size."""
    if flat.element_size() == 1:  # eight-bit floats can't be repeated
        values, flat = values.view(torch.uint8), flat.view(torch.uint8)
    block = values.repeat(min(_REPEATS, -(-flat.numel() // _PERIOD)))
    whole = flat.numel() // block.numel() * block.numel()
    flat[:whole].view(-1, block.numel()).copy_(block)
    flat[whole:].copy_(block[: flat.numel() - whole])
