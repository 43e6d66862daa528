"""Parts: safetensors files that are written one tensor at a time, and read as memory-mapped views.

The safetensors library writes a file in one call, with all its tensors at hand. Here a tensor may be
rebuilt just before it is written and dropped right after, so the bytes are streamed and the header,
for which room was left, is written at the end. The format (8 bytes of header length, a JSON header
that may end in spaces, then the bytes) is the library's own, which reads the files.
"""

import json
import os
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from blake3 import blake3
from safetensors import SafetensorError, safe_open

from vllm_sharded_state.errors import IncompleteError

#: Names of dtypes in the safetensors format, where torch's differ.
_DTYPES = {
    torch.float64: "F64",
    torch.float32: "F32",
    torch.float16: "F16",
    torch.bfloat16: "BF16",
    torch.float8_e4m3fn: "F8_E4M3",
    torch.float8_e5m2: "F8_E5M2",
    torch.float8_e8m0fnu: "F8_E8M0",
    torch.int64: "I64",
    torch.int32: "I32",
    torch.int16: "I16",
    torch.int8: "I8",
    torch.uint64: "U64",
    torch.uint32: "U32",
    torch.uint16: "U16",
    torch.uint8: "U8",
    torch.bool: "BOOL",
    torch.complex64: "C64",
}
#: Length of a tensor's BLAKE3 checksum.
CHECKSUM_BYTES = 16
#: Bytes of header that one tensor takes beside its key.
_ENTRY_ROOM = 160
#: Bytes that are brought to the host at a time when a tensor lies on another device or is strided.
_CHUNK = 64 << 20


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
        self.files: dict[str, int] = {}

    def add(self, key: str, tensor: torch.Tensor) -> tuple[str, str]:
        """Write `tensor` under `key`; returns the name of the file it went to, and its checksum."""
        size = tensor.numel() * tensor.element_size()
        full = self._max_size is not None and self._offset + size > self._max_size
        if self._file is None or (full and self._header):
            self._finish()
            self._begin()
        digest = blake3()
        for chunk in _host_bytes(tensor):
            self._file.write(chunk)
            digest.update(chunk)
        self._header[key] = {
            "dtype": _DTYPES[tensor.dtype],
            "shape": list(tensor.shape),
            "data_offsets": [self._offset, self._offset + size],
        }
        self._offset += size
        return self._name(self._part), digest.hexdigest(length=CHECKSUM_BYTES)

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
        self._file.write(self._room.to_bytes(8, "little") + header.ljust(self._room, b" "))
        self._file.flush()
        os.fsync(self._file.fileno())
        self._file.close()
        self._file = None
        name = self._name(self._part)
        self.files[name] = self._temporary(name).stat().st_size


def header_room(keys: Any) -> int:
    """Header bytes that tensors under `keys` take at most (a key grows when JSON escapes it)."""
    return 64 + sum(len(json.dumps(key)) + _ENTRY_ROOM for key in keys)


def stale_parts(directory: Path, name: Callable[[str], str], keep: set[str]) -> list[Path]:
    """Files in `directory` that carry this rank's part name but are not among `keep`."""
    before, _, after = name("\0").partition("\0")
    pattern = re.compile(re.escape(before) + r"\d+" + re.escape(after))
    return sorted(
        path
        for path in directory.iterdir()
        if pattern.fullmatch(path.name) and path.name not in keep
    )


class PartReader:
    """The tensors of several part files, as views of memory-mapped bytes; each key once.

    Raises `IncompleteError` for a file that is missing, has another size than `sizes` says, or is no
    safetensors file.
    """

    def __init__(self, directory: Path, sizes: dict[str, int | None]) -> None:
        self._directory = directory
        self._handles: dict[str, Any] = {}
        for name, size in sizes.items():
            path = directory / name
            if not path.is_file():
                raise IncompleteError(f"{path} is missing. Copy it there, or save the model again.")
            if size is not None and path.stat().st_size != size:
                raise IncompleteError(
                    f"{path} has {path.stat().st_size} bytes, {size} were written: it was cut off or "
                    "replaced.\nCopy it again, or save the model again."
                )
            try:
                self._handles[name] = safe_open(path, framework="pt")
            except (SafetensorError, OSError) as error:
                raise IncompleteError(f"{path} is no readable safetensors file: {error}") from error

    def keys(self, name: str) -> list[str]:
        """The keys of one file."""
        return list(self._handles[name].keys())

    def get(self, name: str, key: str) -> torch.Tensor:
        """One tensor on the CPU; its pages are read when they are touched."""
        return self._handles[name].get_tensor(key)

    def verified(self, name: str, key: str, checksum: str) -> torch.Tensor:
        """Like `get`, once the bytes were found to be those written. Raises `IncompleteError`."""
        tensor = self.get(name, key)
        digest = blake3()
        for chunk in _host_bytes(tensor):
            digest.update(chunk)
        if digest.hexdigest(length=CHECKSUM_BYTES) != checksum:
            raise IncompleteError(
                f"{key} in {self._directory / name} is not what was saved: the file is damaged, or of "
                "another save.\nCopy it again, or save the model again."
            )
        return tensor

    def form(self, name: str, key: str) -> tuple[list[int], str]:
        """Shape and safetensors dtype of one tensor, from the header."""
        piece = self._handles[name].get_slice(key)
        return list(piece.get_shape()), str(piece.get_dtype())


def dtype_name(dtype: torch.dtype) -> str:
    """The safetensors name of a dtype. Raises `KeyError` for one that the format lacks."""
    return _DTYPES[dtype]


def holds(dtype: torch.dtype) -> bool:
    """Whether the safetensors format has `dtype`."""
    return dtype in _DTYPES


def _host_bytes(tensor: torch.Tensor) -> Any:
    """The bytes of `tensor` in row-major order, without a copy where it is contiguous on the host."""
    tensor = tensor.detach()
    if tensor.numel() == 0:
        return
    if tensor.device.type == "cpu" and tensor.is_contiguous():
        yield memoryview(tensor.reshape(-1).view(torch.uint8).numpy())
        return
    rows = tensor if tensor.dim() else tensor.reshape(1)
    row_bytes = rows[0].numel() * rows.element_size()
    step = max(1, _CHUNK // max(1, row_bytes))
    for start in range(0, rows.shape[0], step):
        piece = rows[start : start + step].contiguous().cpu()
        yield memoryview(piece.view(-1).view(torch.uint8).numpy())
