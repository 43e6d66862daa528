"""Means to change a saved directory from outside: bytes, headers, manifests, checksums made to fit."""

import json
import random
import zlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

from xxhash import xxh3_128

from tests.support import edit

#: What a header or a manifest is, once parsed.
Data = dict[str, Any]


def dice(name: str) -> random.Random:
    """Random numbers that depend on `name` only, in every process."""
    return random.Random(zlib.crc32(name.encode()))


def write(path: Path, data: bytes) -> None:
    """Put `data` in the place of a file, which may be a link to the good directory's."""
    assert path.is_symlink() or not path.exists() or path.read_bytes() != data, "nothing changed"
    path.unlink(missing_ok=True)
    path.write_bytes(data)


def main_part(directory: Path) -> Path:
    return edit.parts(directory)[0]


def last_part(directory: Path) -> Path:
    return edit.parts(directory)[-1]


def hidden_part(directory: Path) -> Path:
    (path,) = directory.glob("hidden-state-rank-0-part-0.safetensors")
    return path


def manifest_file(directory: Path) -> Path:
    return directory / edit.MANIFEST


def split(path: Path) -> tuple[bytes, bytes]:
    """Header and data of a safetensors file, without the length."""
    data = path.read_bytes()
    end = 8 + int.from_bytes(data[:8], "little")
    return data[8:end], data[end:]


def join(header: bytes, data: bytes) -> bytes:
    return len(header).to_bytes(8, "little") + header + data


def encoded(text: str) -> bytes:
    """UTF-8, and what would be UTF-8 of a lone surrogate."""
    return text.encode("utf-8", "surrogatepass")


def padded(header: Data | str | bytes, room: int) -> bytes:
    """A header as bytes, with spaces up to `room` where it is shorter, as a save leaves it."""
    if isinstance(header, dict):
        header = json.dumps(header)
    if isinstance(header, str):
        header = encoded(header)
    return header.ljust(room)


def tensors_of(path: Path) -> Data:
    """The header's entries of tensors that have bytes, in the order of their bytes."""
    header = json.loads(split(path)[0])
    header.pop("__metadata__", None)
    order = sorted(header.items(), key=lambda item: item[1]["data_offsets"])
    return {
        key: entry for key, entry in order if entry["data_offsets"][0] < entry["data_offsets"][1]
    }


def file_entry(path: Path) -> dict[str, Any]:
    """What the manifest says of a file: its size, and the checksum of its length and header."""
    with open(path, "rb") as file:
        start = file.read(8)
        header = file.read(min(int.from_bytes(start, "little"), 128 << 20))
    return {"size": path.stat().st_size, "header": xxh3_128(start + header).hexdigest()}


def relist(directory: Path, *paths: Path) -> None:
    """Make the manifest agree with the files' sizes and headers, which were changed; not with tensors."""
    manifest = edit.read_manifest(directory)
    for rank in manifest["ranks"]:
        for path in paths:
            if path.name in rank["files"]:
                rank["files"][path.name] = file_entry(path)
    sign(directory, manifest)


def edit_manifest(directory: Path, change: Callable[[Data], None]) -> None:
    """Let `change` edit the manifest, and make its own checksum fit."""
    manifest = edit.read_manifest(directory)
    change(manifest)
    sign(directory, manifest)


def edit_stale(directory: Path, change: Callable[[Data], None]) -> None:
    """Let `change` edit the manifest; its checksum stays what it was."""
    manifest = edit.read_manifest(directory)
    change(manifest)
    write(manifest_file(directory), encoded(json.dumps(manifest, indent=1)))


def sign(directory: Path, manifest: Any) -> None:
    """Write a manifest as a save does, whatever it holds, with a checksum that fits."""
    rest = {name: value for name, value in manifest.items() if name != "checksum"}
    edit.sign(directory, encoded(json.dumps(_sorted(rest), indent=1, ensure_ascii=False)))


def _sorted(rest: Data) -> Data:
    """What is a table of names is sorted, as a save has it; a record's fields have their own order."""

    def table(holder: Any, *names: str) -> None:
        for name in names:
            if isinstance(holder, dict) and isinstance(holder.get(name), dict):
                holder[name] = dict(sorted(holder[name].items()))

    table(rest, "written_by", "side_files")
    table(rest.get("binding"), "world", "model", "runtime")
    for rank in rest["ranks"] if isinstance(rest.get("ranks"), list) else []:
        table(rank, "files", "units", "kernels", "tensors", "values")
    return rest
