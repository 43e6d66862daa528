"""Part writer: safetensors files that are written one tensor at a time.

The safetensors library writes a file in one call, with all its tensors at hand. Here a tensor may be
rebuilt just before it is written and dropped right after, so the bytes are streamed and the header,
for which room was left, is written at the end. The format (8 bytes of header length, a JSON header
that may end in spaces, then the bytes) is the library's own, which reads the files.

Large tensors are hashed in a second thread while the same bytes are written, so both take no longer than
the write alone; small ones are hashed, collected and written together.
"""

import json
import os
import re
from collections.abc import Callable, Iterable
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any

import torch

from vllm_sharded_state.errors import SaveError

from . import staging
from .checksum import Hash, checksum, host_bytes
from .dtypes import dtype_name
from .entries import FileEntry
from .header import MAX_HEADER, OURS

#: Bytes that are hashed and written at a time: few enough to stay in the processor's cache.
STEP = 4 << 20

#: Small tensors are collected up to this many bytes, and written together.
BUFFER = 1 << 20

#: Bytes of header that one tensor takes at most beside its key and its shape.
_ENTRY_ROOM = 100

#: Bytes of header around the tensors' entries.
_FRAME = len(OURS) + 1


class PartWriter:
    """Writes tensors into parts `name(0)`, `name(1)`, … of `directory`, staged under `save_id`.

    `room` is the number of header bytes to leave in each part. A new part begins when one holds
    `max_size` bytes of tensors, or when its header is full; `name` has to tell parts apart then.

    `files` holds what is complete: after `close` all of it. Raises `OSError` for what the file system
    refuses, and `SaveError` for a header that is full where `name` gives one name only.
    """

    def __init__(
        self,
        directory: Path,
        name: Callable[[int], str],
        max_size: int | None,
        room: int,
        save_id: str | None = None,
    ) -> None:
        self._directory = directory
        self._save_id = save_id or staging.new_id()
        self._name = name
        self._max_size = max_size
        room = min(max(room, _FRAME + 256), MAX_HEADER - 4096)
        self._room = room + (-(room + 8)) % 4096
        self._part = -1
        self._fd: int | None = None
        self._current = ""
        self._entries: list[str] = []
        self._used = 0
        self._offset = 0
        self._flushed = 0
        self._buffer = memoryview(bytearray(BUFFER))
        self._filled = 0
        self._hashing: ThreadPoolExecutor | None = None
        self.files: dict[str, FileEntry] = {}

    def add(self, key: str, tensor: torch.Tensor) -> tuple[str, str]:
        """Write `tensor` under `key`; returns the name of the file it went to, and its checksum."""
        size = tensor.numel() * tensor.element_size()
        start = f'{json.dumps(key)}:{{"dtype":"{dtype_name(tensor.dtype)}","shape":'
        start += f'{json.dumps(list(tensor.shape), separators=(",", ":"))},"data_offsets":['
        if self._fd is None or not self._fits(size, len(start)):
            self._begin(key, len(start))
        digest = self._write(tensor)
        entry = f"{start}{self._offset},{self._offset + size}]}}"
        self._entries.append(entry)
        self._used += len(entry) + 1
        self._offset += size
        return self._current, digest

    def close(self) -> None:
        """Complete the last part, flushed. Until `commit` the parts lie under staged names."""
        self._finish()
        self._stop_hashing()

    def commit(self) -> None:
        """Give the parts their names, as the last step of a save that has this one writer only."""
        staging.place(self._directory, self._save_id, self.files, ())

    def abandon(self) -> None:
        """Remove all that was written. Raises `OSError`."""
        self._stop_hashing()
        if self._fd is not None:
            fd, self._fd = self._fd, None
            os.close(fd)
        for name in {*self.files, self._current} - {""}:
            staging.staged(self._directory, name, self._save_id).unlink(missing_ok=True)

    def _stop_hashing(self) -> None:
        if self._hashing is not None:
            self._hashing.shutdown()
            self._hashing = None

    def _fits(self, size: int, entry: int) -> bool:
        """Whether a tensor of `size` bytes and `entry` bytes of header can go into this part."""
        if not self._entries:
            return self._header_fits(entry)
        full = self._max_size is not None and self._offset + size > self._max_size
        return not full and self._header_fits(entry)

    def _header_fits(self, entry: int) -> bool:
        return self._used + entry + _OFFSETS <= self._room

    def _write(self, tensor: torch.Tensor) -> str:
        digest = None
        for data in host_bytes(tensor):
            if len(data) <= BUFFER // 4:
                if self._filled + len(data) > BUFFER:
                    self._flush()
                self._buffer[self._filled : self._filled + len(data)] = data
                self._filled += len(data)
                if digest is None:
                    digest = Hash(data)
                else:
                    digest.update(data)
                continue
            digest = digest or Hash()
            self._flush()
            self._write_large(data, digest)
        return str((digest or Hash()).hexdigest())

    def _write_large(self, data: memoryview, digest: Any) -> None:
        """Hash and write `data` at once; both threads go through it at one pace, piece by piece."""
        if self._hashing is None:
            self._hashing = ThreadPoolExecutor(1, "vss-checksum")
        before: Future[None] | None = None
        for start in range(0, len(data), STEP):
            piece = data[start : start + STEP]
            hashed = self._hashing.submit(digest.update, piece)
            self._put(piece)
            if before is not None:
                before.result()
            before = hashed
        if before is not None:
            before.result()

    def _flush(self) -> None:
        """Write what small tensors were collected."""
        if self._filled:
            self._put(self._buffer[: self._filled])
            self._filled = 0

    def _put(self, data: memoryview) -> None:
        assert self._fd is not None
        while data:
            written = os.pwrite(self._fd, data, 8 + self._room + self._flushed)
            self._flushed += written
            data = data[written:]

    def _begin(self, key: str, entry: int) -> None:
        self._finish()
        self._part += 1
        self._current = self._name(self._part)
        self._entries, self._used = [], _FRAME
        self._offset = self._flushed = self._filled = 0
        if self._current in self.files:
            raise SaveError(
                f"{self._current} can't hold more than {len(self.files)} part: its header is full at "
                f"{key}, and the pattern gives one name only.\nSave with {{part}} in the pattern."
            )
        path = staging.staged(self._directory, self._current, self._save_id)
        self._fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o666)
        if not self._header_fits(entry):
            raise SaveError(
                f"The header of a part can't hold the entry of {key[:200]!r}: too long."
            )

    def _finish(self) -> None:
        if self._fd is None:
            return
        self._flush()
        text = ",".join([OURS.decode("ascii"), *self._entries])
        header = f"{text}}}".encode("ascii").ljust(self._room)
        if len(header) != self._room:
            raise AssertionError(f"header of {len(header)} bytes, room for {self._room}")
        head = self._room.to_bytes(8, "little") + header
        rest, at = memoryview(head), 0
        while rest:
            written = os.pwrite(self._fd, rest, at)
            at, rest = at + written, rest[written:]
        os.fsync(self._fd)
        fd, self._fd = self._fd, None
        os.close(fd)
        self.files[self._current] = FileEntry(len(head) + self._offset, checksum(head))


#: Bytes of an entry behind `"data_offsets":[`: two numbers of up to 20 digits, and what ends it.
_OFFSETS = 48


def header_room(keys: Iterable[str]) -> int:
    """Header bytes that tensors under `keys` take at most, with shapes of up to six dimensions."""
    return _FRAME + sum(len(json.dumps(key)) + _ENTRY_ROOM + _SHAPE_ROOM for key in keys)


#: Bytes of header that a shape takes, unless it has many dimensions.
_SHAPE_ROOM = 60


def stale_parts(directory: Path, name: Callable[[str], str], keep: set[str]) -> list[Path]:
    """Files in `directory` that carry this rank's part name but are not among `keep`."""
    names = [path.name for path in directory.iterdir()]
    return [directory / found for found in strange_names(names, name, keep)]


def strange_names(names: Iterable[str], name: Callable[[str], str], keep: set[str]) -> list[str]:
    """Those of `names`, sorted, that are part names as `name` gives them but not among `keep`."""
    before, _, after = name("\0").partition("\0")
    pattern = re.compile(re.escape(before) + r"\d+" + re.escape(after))
    return sorted(found for found in names if pattern.fullmatch(found) and found not in keep)
