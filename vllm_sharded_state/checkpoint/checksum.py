"""Checksums of tensors, and the bytes they are of.

XXH3 with 128 bits: it keeps up with memory, which BLAKE3 and SHA-256 do not, and finds damage as they do.
It is no signature: who can change a file can change its checksum too.
"""

from collections.abc import Iterator

import torch
from xxhash import xxh3_128

from .memory import flat, slabs

#: The hash, used as those of `hashlib` are.
Hash = xxh3_128

#: Bytes that are brought to the host at a time when a tensor lies on another device or is strided.
CHUNK = 16 << 20


def checksum(data: bytes | memoryview) -> str:
    """The checksum of `data`: 32 hexadecimal digits."""
    return str(Hash(data).hexdigest())


def host_bytes(tensor: torch.Tensor) -> Iterator[memoryview]:
    """The bytes of `tensor` in row-major order, without a copy where it is contiguous on the host.

    Else they come in pieces of at most `CHUNK` bytes, each valid until the next is asked for: all lie in
    one buffer, because an allocator that is asked for each anew holds many of them.
    """
    tensor = tensor.detach()
    if tensor.numel() == 0:
        return
    flagged = tensor.is_conj() or tensor.is_neg()  # flags that say how to read the bytes
    if tensor.device.type == "cpu" and tensor.is_contiguous() and not flagged:
        yield memoryview(flat(tensor))
        return
    room = torch.empty(min(CHUNK, tensor.numel() * tensor.element_size()), dtype=torch.uint8)
    for piece in slabs(tensor, CHUNK):
        size = piece.numel() * piece.element_size()
        room[:size].view(tensor.dtype).view(piece.shape).copy_(piece)
        yield memoryview(flat(room[:size]))
