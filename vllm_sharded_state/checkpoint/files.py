"""One part file, open for reading: its size, its header, and reads into memory that exists already."""

import os
import stat
import weakref
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from vllm_sharded_state.errors import IncompleteError

from . import header
from .checksum import checksum

#: Buffers that one system call fills at most.
MAX_BUFFERS = min(1024, os.sysconf("SC_IOV_MAX"))

_AGAIN = "Copy it again, or save the model again."


class PartFile:
    """An open safetensors file; it stays the same file when another one takes its name.

    Links are followed: the hub's cache keeps a snapshot's files as links to blobs outside of its
    directory. That a name leads to another file is no danger, because the content is what is checked;
    but the name itself is plain, and it has to lead to a regular file (opening a FIFO would block).

    Reads go through the page cache. `O_DIRECT` was measured on cold files (2.3 GB, virtio disk, two
    cores): 2.0 to 2.2 GB/s, steadily, against 0.5 to 3.4 without; it needs aligned memory and offsets,
    which tensors don't have, so one more copy, and the next start finds nothing in the cache.
    `POSIX_FADV_SEQUENTIAL` and `WILLNEED` gained nothing, and `RANDOM` halved the speed.

    Raises `IncompleteError` for a file that is missing, has not `size` bytes or the `digest` of its
    header (either may be None: not compared), or is no safetensors file.
    """

    def __init__(self, path: Path, size: int | None, digest: str | None) -> None:
        self.path = path
        self.descriptor = _open(path)
        self._closing = weakref.finalize(self, os.close, self.descriptor)
        status = os.fstat(self.descriptor)
        if not stat.S_ISREG(status.st_mode):
            raise IncompleteError(f"{path} is no regular file. {_AGAIN}")
        self.size = status.st_size
        self._changed = status.st_mtime_ns
        if size is not None and self.size != size:
            raise IncompleteError(
                f"{path} has {self.size} bytes, {size} were written: it was cut off or replaced.\n"
                f"{_AGAIN}"
            )
        try:
            prefix = self._bytes(0, min(header.PREFIX, self.size))
            count = header.length(prefix, self.size)
            text = self._bytes(header.PREFIX, count)
            if digest is not None and checksum(prefix + text) != digest:
                raise IncompleteError(
                    f"The header of {path} is not what was saved: the file is damaged, or of another "
                    f"save.\n{_AGAIN}"
                )
            self.places = header.parse(text, self.size)
            self.is_ours = header.is_ours(text)
        except header.HeaderError as error:
            raise IncompleteError(
                f"{path} is no readable safetensors file: {error}.\n{_AGAIN}"
            ) from error

    def close(self) -> None:
        """Close the file; more calls do nothing."""
        self._closing()

    def read(self, offset: int, buffers: Sequence[Any], what: str) -> None:
        """Fill `buffers` (writable, at most `MAX_BUFFERS`) with the bytes from `offset` on, in order.

        Raises `IncompleteError`, which names `what` was being read, when the file ends or fails.
        """
        wanted = sum(map(len, buffers))
        while (count := self._call(offset, buffers, what)) < wanted:
            wanted -= count
            offset += count
            buffers = _rest(buffers, count)

    def read_one(self, offset: int, buffer: Any, what: str) -> None:
        """Like `read`, for one buffer that is not empty."""
        count = self._call(offset, (buffer,), what)
        if count < len(buffer):
            self.read(offset + count, [buffer[count:]], what)

    def _call(self, offset: int, buffers: Sequence[Any], what: str) -> int:
        try:
            count = os.preadv(self.descriptor, buffers, offset)
        except OSError as error:
            raise IncompleteError(
                f"{self.path}: {what} can't be read: {error}.\n{_AGAIN}"
            ) from error
        if count == 0 and any(map(len, buffers)):
            raise IncompleteError(
                f"{self.path} ends at byte {offset}, in {what}: it was cut off while it was read.\n"
                f"{_AGAIN}"
            )
        return count

    def refuse_changed(self, unverified: bool) -> None:
        """Raise `IncompleteError` when the file has changed since it was opened.

        A checksum tells better, so the time of the last change counts only for what had none.
        """
        status = os.fstat(self.descriptor)
        if status.st_size != self.size or (unverified and status.st_mtime_ns != self._changed):
            raise IncompleteError(f"{self.path} was changed while it was read.\n{_AGAIN}")

    def _bytes(self, offset: int, count: int) -> bytes:
        data = bytearray(count)
        self.read(offset, [memoryview(data)], "its header")
        return bytes(data)


def _rest(buffers: Sequence[Any], done: int) -> list[Any]:
    """What is left of `buffers` after their first `done` bytes were filled."""
    for index, buffer in enumerate(buffers):
        if done < len(buffer):
            return [buffer[done:], *buffers[index + 1 :]]
        done -= len(buffer)
    return []


def _open(path: Path) -> int:
    try:
        # Asked first, because opening a device may already do something. O_NONBLOCK: should a FIFO
        # have taken its place since, opening it returns.
        regular = stat.S_ISREG(os.stat(path).st_mode)
        if regular:
            return os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK | os.O_NOCTTY)
    except FileNotFoundError as error:
        raise IncompleteError(
            f"{path} is missing. Copy it there, or save the model again."
        ) from error
    except OSError as error:
        raise IncompleteError(f"{path} can't be opened: {error}.\n{_AGAIN}") from error
    raise IncompleteError(f"{path} is no regular file. {_AGAIN}")
