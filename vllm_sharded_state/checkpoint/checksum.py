"""Checksums of tensors, and the bytes they are of.

XXH3 with 128 bits: it keeps up with memory, which BLAKE3 and SHA-256 do not, and finds damage as they do.
It is no signature: who can change a file can change its checksum too.
"""

from collections.abc import Iterator

import torch
from xxhash import xxh3_128

from .memory import flat

#: The hash, used as those of `hashlib` are.
Hash = xxh3_128

#: Bytes that are brought to the host at a time when a tensor lies on another device or is strided.
CHUNK = 64 << 20


def checksum(data: bytes | memoryview) -> str:
    """The checksum of `data`: 32 hexadecimal digits."""
    return str(Hash(data).hexdigest())


def host_bytes(tensor: torch.Tensor) -> Iterator[memoryview]:
    """The bytes of `tensor` in row-major order, without a copy where it is contiguous on the host."""
    tensor = tensor.detach()
    if tensor.numel() == 0:
        return
    if tensor.device.type == "cpu" and tensor.is_contiguous():
        yield memoryview(flat(tensor))
        return
    rows = tensor if tensor.dim() else tensor.reshape(1)
    row_bytes = rows[0].numel() * rows.element_size()
    step = max(1, CHUNK // max(1, row_bytes))
    for start in range(0, rows.shape[0], step):
        piece = rows[start : start + step].contiguous().cpu()
        yield memoryview(flat(piece))
