"""`sharded_state.json`: what the parts of a checkpoint hold and what they may be loaded into.

The manifest is written last and by renaming, so a directory without it is not complete. Layout:

- `format`, `version`: this file's own format; a reader refuses a version it does not know.
- `written_by`: package, vLLM and torch versions.
- `binding`: fields that must agree with the engine that loads, by group (`model`, `world`, and
  `runtime` where a unit is in runtime layout).
- `tied_word_embeddings`: whether `lm_head` and the input embeddings were one tensor.
- `ranks`: one `RankEntry` each.
- `checksum`: of all the rest.
"""

import json
import os
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from vllm_sharded_state.errors import ManifestError

from .checksum import checksum as of_bytes

FILE_NAME = "sharded_state.json"
FORMAT = "vllm-sharded-state"
VERSION = 1

#: A key in a part of a checkpoint that stock vLLM would load but not wholly: it names what is needed.
STOCK_STOP = "needs the package vllm-sharded-state"

#: Ends the name of an entry when its path is taken: a buffer of a source unit that is put back after
#: processing too, or a value that is set before processing as well.
AGAIN = "@again"


@dataclass
class TensorEntry:
    """One tensor: where its bytes are, its form, and the other paths under which a model has it.

    `checksum` is the XXH3 hash (128 bits) of its bytes in row-major order, in hexadecimal.
    `stage` is `source` when it is placed before processing and `runtime` after; `owner` names the
    module whose plain attribute it is when no load creates it; `replace` says that a load creates a
    tensor of another form in its place.
    """

    file: str
    key: str
    kind: str
    dtype: str
    shape: list[int]
    stage: str
    checksum: str
    aliases: list[str] = field(default_factory=list)
    owner: str | None = None
    replace: bool = False


@dataclass
class ValueEntry:
    """A Python value, as `state.plain.encode` writes it, set before or after processing (`stage`)."""

    value: Any
    stage: str
    owner: str | None = None


@dataclass
class UnitEntry:
    """Layout of one unit, and the class of the quantization method that processes it, if any does."""

    layout: str
    method: str | None


@dataclass
class FileEntry:
    """One part: its size in bytes, and the checksum of its first 8 + N bytes, length and header."""

    size: int
    header: str


@dataclass
class RankEntry:
    """What one rank wrote: files with sizes in bytes, units, tensors by path, values by path.

    `kernels` holds checksums of what modules compute for fixed inputs, by module name, for processes
    whose `kernel_environment` is the same.
    """

    rank: int
    files: dict[str, FileEntry] = field(default_factory=dict)
    units: dict[str, UnitEntry] = field(default_factory=dict)
    kernels: dict[str, str] = field(default_factory=dict)
    kernel_environment: str = ""
    tensors: dict[str, TensorEntry] = field(default_factory=dict)
    values: dict[str, ValueEntry] = field(default_factory=dict)


@dataclass
class Manifest:
    """The whole file."""

    written_by: dict[str, str]
    binding: dict[str, dict[str, Any]]
    tied_word_embeddings: bool
    ranks: list[RankEntry]

    def rank(self, rank: int) -> RankEntry:
        """The entry of `rank`. Raises `ManifestError` when there is none."""
        for entry in self.ranks:
            if entry.rank == rank:
                return entry
        raise ManifestError(f"{FILE_NAME} has no entry for rank {rank}; save the model again.")


def write(directory: Path, manifest: Manifest) -> None:
    """Publish `manifest` in `directory`, atomically."""
    data: dict[str, Any] = {"format": FORMAT, "version": VERSION, **asdict(manifest)}
    data["checksum"] = checksum(data)
    _replace(directory, data)


def _replace(directory: Path, data: dict[str, Any]) -> None:
    temporary = directory / f".{FILE_NAME}.tmp"
    with open(temporary, "w", encoding="utf-8") as file:
        json.dump(data, file, indent=1)
        file.flush()
        os.fsync(file.fileno())
    os.replace(temporary, directory / FILE_NAME)


def checksum(data: dict[str, Any]) -> str:
    """XXH3 of everything in a manifest but its own checksum, whatever its order and white space."""
    rest = {name: value for name, value in data.items() if name != "checksum"}
    text = json.dumps(rest, sort_keys=True, separators=(",", ":"))
    return of_bytes(text.encode())


def mark_unfinished(directory: Path) -> None:
    """Replace a manifest before files that it speaks of are, so that a mixture is not taken for whole."""
    _replace(directory, {"format": FORMAT, "version": VERSION, "unfinished": True})


def read(directory: Path) -> Manifest | None:
    """The manifest of `directory`, or None where there is none.

    Raises `ManifestError` for one that is damaged, or written by a newer version of this package.
    """
    path = directory / FILE_NAME
    try:
        text = path.read_text(encoding="utf-8")
    except FileNotFoundError:
        return None
    except (OSError, UnicodeDecodeError) as error:
        raise ManifestError(f"{path} can't be read: {error}") from error
    try:
        return _parse(json.loads(text))
    except (ValueError, TypeError, KeyError, AttributeError, RecursionError) as error:
        raise ManifestError(
            f"{path} is damaged ({type(error).__name__}: {error}).\nSave the model again."
        ) from error


def _parse(data: dict[str, Any]) -> Manifest:
    if data.get("format") != FORMAT:
        raise ValueError(f"format is {data.get('format')!r}, not {FORMAT!r}")
    if data["version"] != VERSION:
        raise ValueError(f"version {data['version']} is not the version {VERSION} known here")
    if data.get("unfinished"):
        raise ValueError("a save into this directory did not finish")
    if data["checksum"] != checksum(data):
        raise ValueError("its checksum does not fit: the file was changed")
    return Manifest(
        written_by=dict(data["written_by"]),
        binding={group: dict(fields) for group, fields in data["binding"].items()},
        tied_word_embeddings=bool(data["tied_word_embeddings"]),
        ranks=[_parse_rank(entry) for entry in data["ranks"]],
    )


def _parse_rank(data: dict[str, Any]) -> RankEntry:
    entry = RankEntry(
        rank=int(data["rank"]),
        files={_plain_name(name): FileEntry(**file) for name, file in data["files"].items()},
        units={name: UnitEntry(**unit) for name, unit in data["units"].items()},
        kernels={str(name): str(checksum) for name, checksum in data["kernels"].items()},
        kernel_environment=str(data["kernel_environment"]),
        tensors={path: TensorEntry(**tensor) for path, tensor in data["tensors"].items()},
        values={path: ValueEntry(**value) for path, value in data["values"].items()},
    )
    for path, tensor in entry.tensors.items():
        if tensor.file not in entry.files:
            raise ValueError(f"tensor {path} lies in {tensor.file!r}, which is not listed")
    return entry


def _plain_name(name: str) -> str:
    """A file name that cannot lead out of the directory."""
    if name in ("", ".", "..") or any(c in name for c in "/\\\0"):
        raise ValueError(f"{name!r} is not a plain file name")
    return name
