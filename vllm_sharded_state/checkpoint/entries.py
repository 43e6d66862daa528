"""What a manifest is made of: typed records, with the constraints that reading validates.

msgspec checks types, patterns, ranges and unknown fields while it decodes, and gives the published JSON
schema (`docs/sharded_state.schema.json`, made by `tools/schema.py`) from the same declarations.
"""

import math
from typing import TYPE_CHECKING, Annotated, Any, Final, Literal, TypeAlias

from msgspec import Meta, Struct

from .dtypes import NAMES

FORMAT: Final = "vllm-sharded-state"
VERSION: Final = 2

#: The end of the text. `$` would also match before a last newline, and JSON schemas know no `\Z`.
_END = r"(?![\s\S])"
#: One component of a path: not empty, nothing that leads elsewhere, never hidden, as staged files are.
_COMPONENT = r"[^./\\\x00-\x1f\x7f][^/\\\x00-\x1f\x7f]*"
_STEP = rf"(?!\.{{1,2}}(/|{_END}))[^/\\\x00-\x1f\x7f]+"
#: What each pattern asks for, in words.
PATTERNS: dict[str, str] = {}


def _text(pattern: str, description: str, longest: int | None = None) -> Meta:
    PATTERNS[pattern + _END] = description
    return Meta(pattern=pattern + _END, description=description, max_length=longest)


Checksum = Annotated[str, _text("^[0-9a-f]{32}", "a checksum: XXH3, 128 bits, hexadecimal")]
FileName = Annotated[str, _text(f"^{_COMPONENT}", "a plain file name", 255)]
RelativePath = Annotated[
    str, _text(f"^{_STEP}(/{_STEP})*", "a path below the directory, with forward slashes", 4095)
]
SaveId = Annotated[str, _text("^[0-9a-f]{16}", "16 hexadecimal digits, drawn anew for each save")]
Size = Annotated[int, Meta(ge=0, le=2**63 - 1, description="bytes")]
Length = Annotated[int, Meta(ge=0, le=2**63 - 1)]
Stride = Annotated[int, Meta(ge=0, le=2**63 - 1)]
Name = Annotated[str, Meta(min_length=1)]
if TYPE_CHECKING:
    # A Literal would ask the same of every variable that is put there.
    Dtype: TypeAlias = str
    Kind: TypeAlias = str
    Stage: TypeAlias = str
    Layout: TypeAlias = str
    Group: TypeAlias = str
else:
    Dtype = Literal[tuple(NAMES)]
    Kind = Literal["parameter", "buffer", "transient", "attribute"]
    Stage = Layout = Literal["source", "runtime"]
    Group = Literal["world", "model", "runtime"]
#: A Python value as `state.plain.encode` writes it.
Encoded = bool | int | str | dict[str, Any] | None


class _Record(Struct, forbid_unknown_fields=True, omit_defaults=True, gc=False):
    """Base of all records: a field that is not known is an error, one at its default is left out.

    They form no cycles, so the collector need not look at them, which at 50,000 it would do for longer
    than all the reading takes.
    """


class FileEntry(_Record):
    """One part: its size in bytes, and the checksum of its first 8+N bytes (length and JSON header)."""

    size: Size
    header: Checksum


class SideFile(_Record):
    """A file beside the weights as it was when saved. A load does not check it: users edit templates."""

    size: Size
    checksum: Checksum


class SourceFile(_Record):
    """A weight file of the checkpoint that the engine was started from.

    `header` is the checksum of a safetensors header (8+N bytes), null for another format; `checksum` is
    of the whole file.
    """

    size: Size
    header: Checksum | None
    checksum: Checksum


class Source(_Record):
    """The checkpoint that the saving engine was started from: its weight files, by name.

    `name` is what the engine was given (a path or hub id), `revision` the hub's; neither is compared.
    `through` lists the saves that lie between, oldest first: an engine that was started from sharded
    state hands on what that was saved from. Weights may have been changed in memory at any step.
    """

    name: str
    revision: str | None
    files: dict[FileName, SourceFile]
    through: list[SaveId] = []


class TensorEntry(_Record):
    """One tensor: where its bytes are, its form, and the other paths under which a model has it.

    `checksum` is of its bytes in row-major order. `stage` is `source` when it is placed before
    processing and `runtime` after; `owner` names the module whose plain attribute it is when no load
    creates it; `replace` says that a load creates a tensor of another form in its place. Such a tensor
    comes back with its `stride` (in elements, as torch counts; left out where it is contiguous), and
    `offset` bytes behind the first element of the tensor at the path `base`, if that is given.
    """

    file: FileName
    key: Name
    kind: Kind
    dtype: Dtype
    shape: Annotated[list[Length], Meta(max_length=64)]
    stage: Stage
    checksum: Checksum
    aliases: list[Name] = []
    owner: str | None = None
    replace: bool = False
    stride: Annotated[list[Stride], Meta(max_length=64)] | None = None
    base: Name | None = None
    offset: Size = 0

    @property
    def nbytes(self) -> int:
        """How many bytes its elements take, each counted once."""
        return math.prod(self.shape) * NAMES[self.dtype]


class ValueEntry(_Record):
    """A Python value, as `state.plain.encode` writes it, set before or after processing (`stage`)."""

    value: Encoded
    stage: Stage
    owner: str | None = None


class UnitEntry(_Record):
    """Layout of one unit, and the class of the quantization method that processes it, if any does.

    In runtime layout, `choices` holds what that method had chosen when it was constructed (kernels,
    backends, switches, by dotted attribute), and `processed` what of it processing changed or added;
    null there is what it took away.
    """

    layout: Layout
    method: str | None
    choices: dict[str, bool | str | None] = {}
    processed: dict[str, bool | str | None] = {}


class RankEntry(_Record):
    """What one rank wrote: files by name, units, tensors by path, values by path.

    `kernels` holds checksums of what modules compute for fixed inputs, by module name, for processes
    whose `kernel_environment` is the same.
    """

    rank: Annotated[int, Meta(ge=0, le=2**31 - 1)]
    files: dict[FileName, FileEntry] = {}
    units: dict[str, UnitEntry] = {}
    kernels: dict[str, Checksum] = {}
    kernel_environment: str = ""
    tensors: dict[Name, TensorEntry] = {}
    values: dict[Name, ValueEntry] = {}
