"""The header of a safetensors file, parsed as if somebody hostile had written it.

The format: 8 bytes of header length (little-endian), a JSON object that may end in spaces, then the
bytes of the tensors, which follow each other without gap or overlap to the end of the file
(https://github.com/huggingface/safetensors#format). The library maps files into memory, so one that
is cut off while it is read kills the process; here bytes are read, and this module checks what they say.
"""

import json
import math
from typing import Any

import msgspec

from .dtypes import NAMES

#: Bytes of header length at the start of a file.
PREFIX = 8
#: The most that a header may take: the safetensors library's own limit (safetensors/src/tensor.rs,
#: `MAX_HEADER_SIZE`).
MAX_HEADER = 100_000_000
#: How the header of every part begins that this package writes; stock vLLM says only "pt".
OURS = b'{"__metadata__":{"format":"pt","saved_by":"vllm-sharded-state"}'
#: Dimensions that a tensor of torch can have.
_MAX_DIMENSIONS = 64
#: Above this size a header must not hold more objects than tensors could take.
_LARGE = 8 << 20
#: Bytes of the shortest entry of a tensor: `"":{"dtype":"U8","shape":[],"data_offsets":[0,0]},`.
_SHORTEST_ENTRY = 50
_FIELDS = ("dtype", "shape", "data_offsets")

_decoder = msgspec.json.Decoder(dict[str, dict[str, str | list[int]]])


class HeaderError(ValueError):
    """What a header says can't be; the message is the reason, without the file's name."""


class Place(msgspec.Struct, gc=False):
    """Form of one tensor, and where its bytes lie: `start` and `end` count from the file's first byte."""

    dtype: str
    shape: list[int]
    start: int
    end: int


def length(prefix: bytes, size: int) -> int:
    """The length in bytes of the JSON header of a file of `size` bytes, from its first `PREFIX` bytes.

    Raises `HeaderError`.
    """
    if len(prefix) < PREFIX:
        raise HeaderError(f"it has only {len(prefix)} bytes")
    count = int.from_bytes(prefix, "little")
    if count > MAX_HEADER:
        raise HeaderError(f"its header claims {count} bytes, more than the {MAX_HEADER} allowed")
    if PREFIX + count > size:
        raise HeaderError(f"its header claims {count} bytes, and the file has {size}")
    return count


def is_ours(header: bytes) -> bool:
    """Whether this package wrote the part, so that a manifest has to tell of it."""
    return header.startswith(OURS)


def parse(header: bytes, size: int) -> dict[str, Place]:
    """The tensors that `header` (the JSON alone) names, in a file of `size` bytes.

    Raises `HeaderError` unless each has a known dtype and a shape that fills its range exactly, and
    the ranges cover the file from the header's end to the last byte, each byte once.
    """
    entries = _decode(header)
    metadata = entries.pop("__metadata__", {})
    if not all(isinstance(value, str) for value in metadata.values()):
        raise HeaderError("its metadata holds something else than strings")
    _refuse_doubled(header, len(entries))
    begin = PREFIX + len(header)
    places = {key: _place(key, entry, begin, size) for key, entry in entries.items()}
    _refuse_gaps(places, begin, size)
    return places


def _decode(header: bytes) -> dict[str, dict[str, Any]]:
    if header[:1] != b"{":
        raise HeaderError("its header is no JSON object")
    if len(header) > _LARGE and header.count(b"{") * _SHORTEST_ENTRY > len(header):
        raise HeaderError("its header holds more objects than it could hold tensors")
    try:
        return _decoder.decode(header)
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise HeaderError(f"its header is not as the format says: {error}") from error


def _refuse_doubled(header: bytes, tensors: int) -> None:
    """Raise for a key that is there twice, of which a decoder would keep the last.

    Without escapes, a field's name in quotes is found once for each entry that was decoded, dropped
    ones included; only where the count is another one (a tensor may be called "shape") is a slower
    decoder asked which it is.
    """
    quick = b"\\" not in header and header.count(b'"__metadata__"') <= 1
    if quick and all(header.count(f'"{name}"'.encode()) == tensors for name in _FIELDS):
        return

    def pairs(items: list[tuple[str, Any]]) -> None:
        names = {name for name, _ in items}
        if len(names) < len(items):
            seen: set[str] = set()
            doubled = next(name for name, _ in items if name in seen or seen.add(name))  # type: ignore[func-returns-value]
            raise HeaderError(f"its header has {_short(doubled)} twice")

    json.loads(header, object_pairs_hook=pairs)


def _place(key: str, entry: dict[str, Any], begin: int, size: int) -> Place:
    try:
        dtype, shape, offsets = entry["dtype"], entry["shape"], entry["data_offsets"]
    except KeyError as error:
        raise HeaderError(f"tensor {_short(key)} has no {error.args[0]}") from error
    if len(entry) != len(_FIELDS):
        raise HeaderError(f"tensor {_short(key)} has other fields than {', '.join(_FIELDS)}")
    if not isinstance(dtype, str) or isinstance(shape, str) or isinstance(offsets, str):
        raise HeaderError(f"tensor {_short(key)} has a field of the wrong type")
    item = NAMES.get(dtype)
    if item is None:
        raise HeaderError(f"tensor {_short(key)} has the unknown dtype {_short(dtype)}")
    if len(offsets) != 2 or not 0 <= offsets[0] <= offsets[1] <= size - begin:
        raise HeaderError(f"tensor {_short(key)} lies outside of the file")
    start, end = offsets
    if len(shape) > _MAX_DIMENSIONS or (shape and min(shape) < 0):
        raise HeaderError(f"tensor {_short(key)} has a shape that no tensor can have")
    elements = math.prod(shape)
    if elements * item != end - start or (elements == 0 and _overflows(shape, item)):
        raise HeaderError(
            f"tensor {_short(key)} has a shape that does not fill its {end - start} bytes"
        )
    return Place(dtype, shape, begin + start, begin + end)


def _overflows(shape: list[int], item: int) -> bool:
    """Whether an empty tensor's other dimensions are more than 64 bits can count."""
    return math.prod(count for count in shape if count) * item >= 2**63


def _short(text: str) -> str:
    return repr(text if len(text) <= 200 else f"{text[:200]}...")


def _refuse_gaps(places: dict[str, Place], begin: int, size: int) -> None:
    position = begin
    for start, end, key in sorted((p.start, p.end, key) for key, p in places.items()):
        if start != position:
            what = "overlaps the tensor before it" if start < position else "follows a gap"
            raise HeaderError(f"tensor {_short(key)} {what}")
        position = end
    if position != size:
        raise HeaderError(f"it has {size} bytes, and its tensors end at {position}")
