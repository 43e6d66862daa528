"""From buffers on the host to tensors elsewhere: other devices, and strided tensors.

A ring has a few buffers for each worker. On CUDA they are pinned, and copies run on a stream of their
own while the next buffer is filled; a buffer is filled again only when its last copy is done.
"""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any, Protocol

import torch

#: Bytes of one buffer.
BUFFER = 8 << 20
#: Buffers of one worker.
_DEPTH = 3


class Transport(Protocol):
    """How bytes leave a buffer."""

    def buffer(self, size: int) -> torch.Tensor:
        """A buffer of `size` bytes, uint8, on the host."""

    def copy(self, pairs: Sequence[tuple[torch.Tensor, torch.Tensor]]) -> Any:
        """Begin to copy each second tensor to the first; returns what `wait` takes."""

    def wait(self, copies: Any) -> None:
        """Return when those copies no longer read their buffer."""

    def finish(self) -> None:
        """Return when all copies have arrived."""


class HostTransport:
    """Copies at once: to strided host tensors, and to devices whose streams are not known here."""

    def buffer(self, size: int) -> torch.Tensor:
        """Ordinary memory."""
        return torch.empty(size, dtype=torch.uint8, device="cpu")

    def copy(self, pairs: Sequence[tuple[torch.Tensor, torch.Tensor]]) -> None:
        """Copy, and return when that is done."""
        for target, source in pairs:
            target.copy_(source)

    def wait(self, copies: None) -> None:
        """Nothing to wait for."""

    def finish(self) -> None:
        """Nothing to wait for."""


class CudaTransport:
    """Copies from pinned memory on a stream of its own, made in the thread that wants the tensors."""

    def __init__(self, device: torch.device) -> None:
        self._stream = torch.cuda.Stream(device)
        # What was begun on the caller's stream, filling the tensors with placeholders say, goes first.
        self._stream.wait_stream(torch.cuda.current_stream(device))

    def buffer(self, size: int) -> torch.Tensor:
        """Pinned memory, which torch keeps for the next time; ordinary memory where none can be had.

        WSL has none, and a limit may be set. Copies from ordinary memory are slower, and still safe.
        """
        try:
            return torch.empty(size, dtype=torch.uint8, device="cpu", pin_memory=True)
        except RuntimeError:
            return torch.empty(size, dtype=torch.uint8, device="cpu")

    def copy(self, pairs: Sequence[tuple[torch.Tensor, torch.Tensor]]) -> torch.cuda.Event:
        """Begin the copies; the event comes after them."""
        with torch.cuda.stream(self._stream):
            for target, source in pairs:
                target.copy_(source, non_blocking=True)
            event = torch.cuda.Event()
            event.record(self._stream)
        return event

    def wait(self, copies: torch.cuda.Event) -> None:
        """Wait for the event."""
        copies.synchronize()

    def finish(self) -> None:
        """Wait for the stream, so that whoever reads the tensors next, on any stream, sees them."""
        self._stream.synchronize()


def transport(device: torch.device) -> Transport:
    """The way to `device`."""
    return CudaTransport(device) if device.type == "cuda" else HostTransport()


class Lane:
    """The buffers of one worker, in turn."""

    def __init__(self, way: Transport, size: int) -> None:
        self.size = size
        self._way = way
        self._buffers: list[torch.Tensor] = []
        self._copies: list[Any] = []
        self._next = 0

    def take(self) -> torch.Tensor:
        """The next buffer (uint8, `size` bytes), once nothing reads it any more."""
        if len(self._buffers) < _DEPTH:
            self._buffers.append(self._way.buffer(self.size))
            self._copies.append(None)
            self._next = len(self._buffers) - 1
            return self._buffers[-1]
        self._next = (self._next + 1) % _DEPTH
        if self._copies[self._next] is not None:
            self._way.wait(self._copies[self._next])
            self._copies[self._next] = None
        return self._buffers[self._next]

    def send(self, pairs: Sequence[tuple[torch.Tensor, torch.Tensor]]) -> None:
        """Copy from the buffer taken last: tensors, each with the bytes for it."""
        typed = [(t, source.view(t.dtype).view(t.shape)) for t, source in pairs]
        self._copies[self._next] = self._way.copy(typed)


class Ring:
    """The buffers of all workers for one device: `_DEPTH` times `size` bytes for each at most."""

    def __init__(self, way: Transport, size: int = BUFFER) -> None:
        self.size = size
        self._way = way
        self._idle: list[Lane] = []

    @contextmanager
    def lane(self) -> Iterator[Lane]:
        """Buffers for one worker, until it gives them back."""
        try:
            lane = self._idle.pop()
        except IndexError:
            lane = Lane(self._way, self.size)
        try:
            yield lane
        finally:
            self._idle.append(lane)

    def finish(self) -> None:
        """Return when every copy has arrived."""
        self._way.finish()
