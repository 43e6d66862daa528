"""One digest over many named things, whatever the order they come in.

Two that are equal tell of equal things, by accident alone; like a checksum it is no signature.
"""

import json
from collections.abc import Iterable, Iterator

import torch

from .checksum import Hash, checksum, host_bytes

Weights = Iterable[tuple[str, torch.Tensor]]


class Digest:
    """A digest that grows by what is noted."""

    def __init__(self) -> None:
        self._notes: list[str] = []

    def note(self, name: str, *facts: object) -> None:
        """Take in facts about `name`, which JSON can hold."""
        self._notes.append(json.dumps([name, *facts]))

    def note_tensor(self, name: str, tensor: torch.Tensor, content: str | None = None) -> None:
        """Take in dtype, shape and bytes of `tensor`; `content` is `tensor_checksum` of it, if known."""
        content = content or tensor_checksum(tensor)
        self.note(name, str(tensor.dtype).removeprefix("torch."), list(tensor.shape), content)

    def over(self, weights: Weights) -> Iterator[tuple[str, torch.Tensor]]:
        """Yield `weights`, and take each in as it passes."""
        for name, tensor in weights:
            self.note_tensor(name, tensor)
            yield name, tensor

    def hexdigest(self) -> str:
        """The digest of all that was noted so far: 32 hexadecimal digits."""
        return checksum("\n".join(sorted(self._notes)).encode())


def tensor_checksum(tensor: torch.Tensor) -> str:
    """The checksum of the bytes of `tensor` in row-major order, on any device and with any strides."""
    content = Hash()
    for piece in host_bytes(tensor):
        content.update(piece)
    return str(content.hexdigest())


def digest(weights: Weights) -> str:
    """The digest of `weights`, names with tensors, in any order: 32 hexadecimal digits.

    It covers name, dtype, shape and bytes of each tensor, not where it lies nor its strides.
    """
    result = Digest()
    for _ in result.over(weights):
        pass
    return result.hexdigest()
