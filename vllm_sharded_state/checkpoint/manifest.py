"""`sharded_state.json`: what the parts of a checkpoint hold and what they may be loaded into.

The manifest is written last and by renaming, so a directory without it is not complete. What `encode`
makes of a content is the only form of it that `read` accepts: its first field is the checksum of every
byte after that line, and what was read has to give the same text when it is written again. So neither
an edit nor a doubled key, another spelling of a number or a NaN goes unnoticed. There are no floating
point numbers in it, whose spelling libraries differ in.
"""

import os
import re
import stat
from pathlib import Path
from typing import Annotated, Any, Literal

import msgspec
from msgspec import Meta

from vllm_sharded_state.errors import ManifestError

from .checksum import checksum as of_bytes
from .entries import (
    FORMAT,
    VERSION,
    Checksum,
    FileEntry,
    FileName,
    Group,
    RankEntry,
    RelativePath,
    SaveId,
    SideFile,
    Source,
    SourceFile,
    TensorEntry,
    UnitEntry,
    ValueEntry,
)
from .explain import explain
from .integrity import violation

__all__ = [
    "AGAIN",
    "FILE_NAME",
    "FORMAT",
    "MAX_BYTES",
    "STOCK_STOP",
    "VERSION",
    "Checksum",
    "FileEntry",
    "FileName",
    "Manifest",
    "RankEntry",
    "SideFile",
    "Source",
    "SourceFile",
    "TensorEntry",
    "UnitEntry",
    "ValueEntry",
    "encode",
    "read",
]

FILE_NAME = "sharded_state.json"
#: Largest manifest in bytes, read or written: about 250,000 tensors over all ranks.
MAX_BYTES = 128 << 20
#: Objects and lists take many times their text in memory. A save has at most one in so many bytes of it.
_BYTES_A_RECORD = 24
_FEW_RECORDS = 10_000

#: A key in a part of a checkpoint that stock vLLM would load but not wholly: it names what is needed.
STOCK_STOP = "needs the package vllm-sharded-state"

#: Ends the name of an entry when its path is taken: a buffer of a source unit that is put back after
#: processing too, or a value that is set before processing as well.
AGAIN = "@again"

_BEGIN = b'{\n "checksum": "'
_FIRST_LINE = re.compile(re.escape(_BEGIN) + rb'([0-9a-f]{32})",\n')
#: Longest text of somebody else's in a message of ours.
_QUOTED = 300


class Manifest(
    msgspec.Struct, forbid_unknown_fields=True, tag_field="format", tag=FORMAT, kw_only=True
):
    """The whole file but its checksum.

    `binding` holds by group (`world`, `model`, `runtime`) the fields that must agree with the engine
    that loads. Until a save has ended, parts lie at `.{name}.{save_id}.tmp`. `side_files` are not
    checked by a load. `source` is null where the engine was started from no weight files on disk.
    """

    version: Literal[2] = VERSION
    written_by: dict[str, str]
    save_id: SaveId
    binding: dict[Group, dict[str, Any]]
    tied_word_embeddings: bool
    source: Source | None = None
    side_files: dict[RelativePath, SideFile] = {}
    ranks: Annotated[list[RankEntry], Meta(min_length=1)]

    def rank(self, rank: int) -> RankEntry:
        """The entry of `rank`. Raises `ManifestError` when there is none."""
        for entry in self.ranks:
            if entry.rank == rank:
                return entry
        raise ManifestError(f"{FILE_NAME} has no entry for rank {rank}; save the model again.")


class _Head(msgspec.Struct):
    """What a manifest of any version says of itself, wherever in the file."""

    format: str
    version: int
    written_by: dict[str, str] = {}


class _Refused(ValueError):
    """What a file is that can be no manifest to be read here, and what to do."""


def _base(value: object) -> str | int:
    """A kind of string or integer of somebody's own, `torch.__version__` say, as what it is a kind of."""
    if isinstance(value, str):
        return str.__str__(value)
    if isinstance(value, int):
        return int(value)
    raise TypeError(f"a {type(value).__name__} is no JSON")


_ENCODER = msgspec.json.Encoder(order="deterministic", enc_hook=_base)
_DECODER = msgspec.json.Decoder(Manifest)
_HEAD = msgspec.json.Decoder(_Head)


def encode(manifest: Manifest) -> bytes:
    """The bytes of `sharded_state.json` for `manifest`. Raises `ManifestError` where it is not sound."""
    try:
        text = _ENCODER.encode(manifest)
        data = _signed(text)
        wrong = violation(_decode(text))
    except (ValueError, TypeError, OverflowError, RecursionError) as error:
        raise ManifestError(f"{FILE_NAME} can't hold this model: {_quote(str(error))}") from error
    if wrong is None and _is_dense(data):
        wrong = "it holds more objects and lists than are read again"
    if wrong is None and len(data) > MAX_BYTES:
        wrong = f"it has {len(data)} bytes, and no more than {MAX_BYTES} are read again"
    if wrong is not None:
        raise ManifestError(f"{FILE_NAME} can't be written: {_quote(wrong)}.")
    return data


def _signed(text: bytes) -> bytes:
    """JSON in the form of the file: indented, behind the checksum of all that follows it."""
    rest = msgspec.json.format(text, indent=1).removeprefix(b"{\n")
    return _BEGIN + of_bytes(rest).encode() + b'",\n' + rest


def read(directory: Path) -> Manifest | None:
    """The manifest of `directory`, or None where there is none.

    Raises `ManifestError` for one that is damaged, was edited, contradicts itself, is larger than
    `MAX_BYTES`, or is of a version that is not read here.
    """
    path = directory / FILE_NAME
    try:
        data = _bytes(path)
        return None if data is None else _parse(data)
    except OSError as error:
        raise ManifestError(f"{path} can't be read: {error}") from error
    except _Refused as error:
        raise ManifestError(f"{path} is refused: {error}") from error
    except (ValueError, TypeError, OverflowError, RecursionError) as error:
        raise ManifestError(
            f"{path} is damaged: {_quote(str(error) or type(error).__name__)}.\n"
            "Copy it again, or save the model again."
        ) from error


def _decode(data: bytes) -> Manifest:
    try:
        return _DECODER.decode(data)
    except msgspec.ValidationError as error:
        raise ValueError(explain(error, data)) from error


def _bytes(path: Path) -> bytes | None:
    """All bytes of a regular file of bounded size; None where there is none."""
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
    except FileNotFoundError:
        if path.is_symlink():
            raise _Refused("it is a link to nothing.\nCopy the file that it meant.") from None
        return None
    with open(descriptor, "rb") as file:
        found = os.fstat(descriptor)
        if not stat.S_ISREG(found.st_mode):
            raise _Refused("it is no regular file.\nCopy it again, or save the model again.")
        if found.st_size > MAX_BYTES:
            raise _Refused(
                f"it has {found.st_size} bytes, and at most {MAX_BYTES} are read.\n"
                "Save the model again."
            )
        return file.read(MAX_BYTES)


def _is_dense(data: bytes) -> bool:
    records = data.count(b"{") + data.count(b"[")
    return records > _FEW_RECORDS + len(data) // _BYTES_A_RECORD


def _parse(data: bytes) -> Manifest:
    _check_head(_HEAD.decode(data))
    first = _FIRST_LINE.match(data)
    if first is None:
        raise ValueError("its first line is not its checksum")
    rest = data[first.end() :]
    if of_bytes(rest).encode() != first[1]:
        raise ValueError("its checksum does not fit, so it was changed after the save")
    if _is_dense(data):
        raise ValueError("it holds more objects and lists than a save writes")
    manifest = _decode(b"{\n" + rest)
    # White space is left to the checksum, so that no library's taste in it can lock a checkpoint out.
    if _ENCODER.encode(manifest) != msgspec.json.format(b"{\n" + rest, indent=-1):
        raise ValueError(
            "it is not written as a save writes it: a doubled key, or another spelling"
        )
    wrong = violation(manifest)
    if wrong is not None:
        raise ValueError(wrong)
    return manifest


def _check_head(head: _Head) -> None:
    if head.format != FORMAT:
        raise _Refused(f"its format is '{_quote(head.format)}', not {FORMAT!r}.")
    writer = _quote(head.written_by.get("vllm-sharded-state", "of an unknown version"))
    if head.version > VERSION:
        raise _Refused(
            f"vllm-sharded-state {writer} wrote it in format version {head.version}; up to "
            f"{VERSION} is read here.\nInstall that version of vllm-sharded-state or a later one."
        )
    if head.version < VERSION:
        raise _Refused(
            f"vllm-sharded-state {writer} wrote it in format version {head.version}, which was never "
            f"released; {VERSION} is read here.\nSave the model again."
        )


def _quote(text: str) -> str:
    """A file's own words on one line, cut where they grow long."""
    line = "".join(c if c.isprintable() else f"\\x{ord(c):02x}" for c in text[:_QUOTED])
    return line if len(line) <= _QUOTED else f"{line[:_QUOTED]} …"
