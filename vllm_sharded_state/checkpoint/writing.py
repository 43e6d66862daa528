"""Part writer: safetensors files that are written one tensor at a time.

The safetensors library writes a file in one call, with all its tensors at hand. Here a tensor may be
rebuilt just before it is written and dropped right after, so the bytes are streamed and the header,
for which room was left, is written at the end. The format (8 bytes of header length, a JSON header
that may end in spaces, then the bytes) is the library's own, which reads the files.
"""

import json
import os
import re
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import torch

from .checksum import Hash, checksum, host_bytes
from .dtypes import dtype_name
from .manifest import FileEntry

#: Bytes of header that one tensor takes beside its key.
_ENTRY_ROOM = 160


class PartWriter:
    """Writes tensors into `directory/name(0)`, `name(1)`, …, a new part when `max_size` is reached.

    `room` is the number of header bytes to leave in each part, at least what `header_room` says.
    """

    def __init__(
        self, directory: Path, name: Callable[[int], str], max_size: int | None, room: int
    ) -> None:
        self._directory = directory
        self._name = name
        self._max_size = max_size
        self._room = room + (-(room + 8)) % 4096
        self._part = -1
        self._file: Any = None
        self._header: dict[str, Any] = {}
        self._offset = 0
        self.files: dict[str, FileEntry] = {}

    def add(self, key: str, tensor: torch.Tensor) -> tuple[str, str]:
        """Write `tensor` under `key`; returns the name of the file it went to, and its checksum."""
        size = tensor.numel() * tensor.element_size()
        full = self._max_size is not None and self._offset + size > self._max_size
        if self._file is None or (full and self._header):
            self._finish()
            self._begin()
        digest = Hash()
        for chunk in host_bytes(tensor):
            self._file.write(chunk)
            digest.update(chunk)
        self._header[key] = {
            "dtype": dtype_name(tensor.dtype),
            "shape": list(tensor.shape),
            "data_offsets": [self._offset, self._offset + size],
        }
        self._offset += size
        return self._name(self._part), digest.hexdigest()

    def close(self) -> None:
        """Complete the last part. Until `commit` the parts lie under temporary names."""
        self._finish()

    def commit(self) -> None:
        """Give the parts their names."""
        for name in self.files:
            os.replace(self._temporary(name), self._directory / name)

    def abandon(self) -> None:
        """Remove all that was written."""
        if self._file is not None:
            self._file.close()
            self._file = None
        for part in range(self._part + 1):
            self._temporary(self._name(part)).unlink(missing_ok=True)

    def _temporary(self, name: str) -> Path:
        return self._directory / f".{name}.tmp"

    def _begin(self) -> None:
        self._part += 1
        self._header, self._offset = {}, 0
        self._file = open(self._temporary(self._name(self._part)), "wb")  # noqa: SIM115 - closed in _finish
        self._file.seek(8 + self._room)

    def _finish(self) -> None:
        if self._file is None:
            return
        header = json.dumps(
            {"__metadata__": {"format": "pt"}, **self._header}, separators=(",", ":")
        ).encode()
        if len(header) > self._room:
            raise AssertionError(f"header of {len(header)} bytes, room for {self._room}")
        self._file.seek(0)
        head = self._room.to_bytes(8, "little") + header.ljust(self._room, b" ")
        self._file.write(head)
        self._file.flush()
        os.fsync(self._file.fileno())
        self._file.close()
        self._file = None
        name = self._name(self._part)
        self.files[name] = FileEntry(self._temporary(name).stat().st_size, checksum(head))


def header_room(keys: Any) -> int:
    """Header bytes that tensors under `keys` take at most (a key grows when JSON escapes it)."""
    return 64 + sum(len(json.dumps(key)) + _ENTRY_ROOM for key in keys)


def stale_parts(directory: Path, name: Callable[[str], str], keep: set[str]) -> list[Path]:
    """Files in `directory` that carry this rank's part name but are not among `keep`."""
    names = [path.name for path in directory.iterdir()]
    return [directory / found for found in strange_names(names, name, keep)]


def strange_names(names: Iterable[str], name: Callable[[str], str], keep: set[str]) -> list[str]:
    """Those of `names`, sorted, that are part names as `name` gives them but not among `keep`."""
    before, _, after = name("\0").partition("\0")
    pattern = re.compile(re.escape(before) + r"\d+" + re.escape(after))
    return sorted(found for found in names if pattern.fullmatch(found) and found not in keep)
