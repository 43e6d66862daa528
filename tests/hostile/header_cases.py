"""Headers of safetensors files that lie, each with the manifest as it was and with it brought up to date.

Brought up to date, the manifest agrees with the file's size and header, so that only reading the header
can tell. The file keeps its size where there is room.
"""

import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from tests.hostile import spoil
from tests.hostile.corpus import Case, Change

#: Changes a parsed header; `a` and `b` are its first two keys, of neighbours in the data.
Edit = Callable[[dict[str, Any], str, str], Any]
#: Changes the header's text.
TextEdit = Callable[[str], str | bytes]


def _offsets(make: Callable[[int, int, int], Any]) -> Edit:
    """The first tensor's `data_offsets`, made of its start, its end and the size of all data."""

    def change(header: dict[str, Any], a: str, b: str) -> None:
        start, end = header[a]["data_offsets"]
        size = max(entry["data_offsets"][1] for entry in header.values())
        header[a]["data_offsets"] = make(start, end, size)

    return change


def _shape(make: Callable[[list[int]], Any]) -> Edit:
    def change(header: dict[str, Any], a: str, b: str) -> None:
        header[a]["shape"] = make(header[a]["shape"])

    return change


def _field(name: str, value: Any) -> Edit:
    def change(header: dict[str, Any], a: str, b: str) -> None:
        header[a][name] = value

    return change


def _drop(name: str) -> Edit:
    def change(header: dict[str, Any], a: str, b: str) -> None:
        del header[a][name]

    return change


def _rename(make: Callable[[str], str]) -> Edit:
    def change(header: dict[str, Any], a: str, b: str) -> None:
        header[make(a)] = header.pop(a)

    return change


def _same_bytes(header: dict[str, Any], a: str, b: str) -> None:
    header[b]["data_offsets"] = header[a]["data_offsets"]


def _exchanged(header: dict[str, Any], a: str, b: str) -> None:
    header[a], header[b] = header[b], header[a]


def _half_over(header: dict[str, Any], a: str, b: str) -> None:
    start, end = header[b]["data_offsets"]
    header[b]["data_offsets"] = [start - 2, end - 2]


def _lost(header: dict[str, Any], a: str, b: str) -> None:
    del header[a]


def _entry(value: Any) -> Edit:
    def change(header: dict[str, Any], a: str, b: str) -> None:
        header[a] = value

    return change


def _added(name: str, value: Any) -> Edit:
    def change(header: dict[str, Any], a: str, b: str) -> None:
        header[name] = value

    return change


def _whole(value: Any) -> Edit:
    return lambda header, a, b: (value,)


EDITS: dict[str, Edit] = {
    "offsets past the end": _offsets(lambda s, e, n: [n - 2, n - 2 + e - s]),
    "offsets far past the end": _offsets(lambda s, e, n: [2**62, 2**62 + e - s]),
    "offsets before the start": _offsets(lambda s, e, n: [s - (e - s), s]),
    "offsets reversed": _offsets(lambda s, e, n: [e, s]),
    "offsets of nothing": _offsets(lambda s, e, n: [s, s]),
    "offsets one byte short": _offsets(lambda s, e, n: [s, e - 1]),
    "offsets one byte long": _offsets(lambda s, e, n: [s, e + 1]),
    "offsets of one byte later": _offsets(lambda s, e, n: [s + 1, e + 1]),
    "offsets of all data": _offsets(lambda s, e, n: [0, n]),
    "offsets that are floats": _offsets(lambda s, e, n: [float(s), float(e)]),
    "offsets that are strings": _offsets(lambda s, e, n: [str(s), str(e)]),
    "offsets that are booleans": _offsets(lambda s, e, n: [False, True]),
    "offsets beyond 64 bits": _offsets(lambda s, e, n: [s, 2**64 + e]),
    "offsets of 400 digits": _offsets(lambda s, e, n: [s, 10**400]),
    "one offset": _offsets(lambda s, e, n: [s]),
    "three offsets": _offsets(lambda s, e, n: [s, e, e]),
    "no offsets": _offsets(lambda s, e, n: []),
    "offsets null": _offsets(lambda s, e, n: None),
    "offsets in an object": _offsets(lambda s, e, n: {"0": s, "1": e}),
    "two tensors of the same bytes": _same_bytes,
    "two tensors exchanged": _exchanged,
    "tensors that overlap": _half_over,
    "a tensor left out": _lost,
    "a shape too large": _shape(lambda x: [2 * x[0], *x[1:]]),
    "a shape too small": _shape(lambda x: [x[0] // 2, *x[1:]]),
    "a shape transposed": _shape(lambda x: x[::-1]),
    "a shape of one dimension more": _shape(lambda x: [1, *x]),
    "a shape that overflows 64 bits": _shape(lambda x: [2**32, 2**32]),
    "a shape that overflows to its size": _shape(lambda x: [2**63, 2, *x]),
    "a shape beyond 64 bits": _shape(lambda x: [2**64 + x[0], *x[1:]]),
    "a shape of minus one": _shape(lambda x: [-1, *x[1:]]),
    "a shape of two minuses": _shape(lambda x: [-n for n in x]),
    "a shape with zero": _shape(lambda x: [0, *x]),
    "a shape of floats": _shape(lambda x: [float(n) for n in x]),
    "a shape of strings": _shape(lambda x: [str(n) for n in x]),
    "a shape of 100,000 ones": _shape(lambda x: [*x, *[1] * 100_000]),
    "a shape null": _shape(lambda x: None),
    "a shape that is a number": _shape(lambda x: x[0]),
    "no shape": _drop("shape"),
    "no dtype": _drop("dtype"),
    "no data_offsets": _drop("data_offsets"),
    "a dtype unheard of": _field("dtype", "BF17"),
    "a dtype in small letters": _field("dtype", "bf16"),
    "a dtype of the same size": _field("dtype", "F16"),
    "a dtype of another size": _field("dtype", "F32"),
    "a dtype of half a byte": _field("dtype", "F4"),
    "a dtype null": _field("dtype", None),
    "a dtype that is a number": _field("dtype", 16),
    "a dtype that is a list": _field("dtype", ["BF16"]),
    "a field more": _field("strides", [1]),
    "an entry null": _entry(None),
    "an entry that is a list": _entry(["BF16", [1], [0, 2]]),
    "an entry that is a number": _entry(1e999),
    "an empty tensor more": _added("x", {"dtype": "U8", "shape": [0], "data_offsets": [0, 0]}),
    "metadata that is a list": _added("__metadata__", ["a"]),
    "metadata of numbers": _added("__metadata__", {"a": 1}),
    "metadata of objects": _added("__metadata__", {"a": {"b": "c"}}),
    "a list": _whole([]),
    "a number": _whole(1),
    "null": _whole(None),
    "no tensors": _whole({}),
    "a name with two dots": _rename(lambda name: "../" + name),
    "a name with slashes": _rename(lambda name: name.replace(".", "/")),
    "a name with NUL": _rename(lambda name: name + "\0"),
    "a name with a newline": _rename(lambda name: name + "\n"),
    "a name with a lone surrogate": _rename(lambda name: name + "\ud800"),
    "a name of a megabyte": _rename(lambda name: name * (2**20 // len(name))),
    "an empty name": _rename(lambda name: ""),
    "a name that looks the same": _rename(lambda name: name.replace("e", "е")),
}

TEXTS: dict[str, TextEdit] = {
    "a duplicate key": lambda text: "{" + text[1 : text.index("},") + 2] + text[1:],
    "a duplicate key that differs": lambda text: _doubled(text),
    "a duplicate field": lambda text: text.replace('"dtype":', '"dtype": "I8", "dtype":', 1),
    "metadata twice": lambda text: '{"__metadata__": {}, "__metadata__": {}, ' + text[1:],
    "text after the end": lambda text: text.rstrip() + " {}",
    "a comma after the last": lambda text: text.rstrip()[:-1] + ",}",
    "a space before the start": lambda text: " " + text.rstrip(),
    "a byte order mark": lambda text: b"\xef\xbb\xbf" + text.rstrip().encode(),
    "UTF-16": lambda text: text.rstrip().encode("utf-16"),
    "bytes that are no UTF-8": lambda text: (
        text.replace("model.", "m\x00del.", 1).encode().replace(b"m\x00", b"m\xff")
    ),
    "a control character in a name": lambda text: text.replace("model.", "mo\x01del.", 1),
    "numbers with an exponent": lambda text: text.replace('offsets": [0,', 'offsets": [0e0,', 1),
    "numbers with a plus": lambda text: text.replace('offsets": [0,', 'offsets": [+0,', 1),
    "a number minus zero": lambda text: text.replace('offsets": [0,', 'offsets": [-0,', 1),
    "NaN for an offset": lambda text: text.replace('offsets": [0,', 'offsets": [NaN,', 1),
    "infinity for an offset": lambda text: text.replace('offsets": [0,', 'offsets": [1e999,', 1),
    "a thousand levels": lambda text: _deep(text, 1000),
    "100,000 levels": lambda text: _deep(text, 100_000),
    "100,000 levels in the metadata": lambda text: (
        '{"__metadata__": ' + '{"a":' * 100_000 + "1" + "}" * 100_000 + ", " + text[1:]
    ),
    "zeros after the end": lambda text: text.rstrip() + "\0" * 8,
    "cut off": lambda text: text.rstrip()[: len(text.rstrip()) // 2],
}


def _doubled(text: str) -> str:
    header = json.loads(text)
    keys = [key for key in header if key != "__metadata__"]
    return "{" + f"{json.dumps(keys[0])}: {json.dumps(header[keys[1]])}, " + text[1:]


def _deep(text: str, levels: int) -> str:
    return '{"x": ' + "[" * levels + "]" * levels + ", " + text[1:]


def _put(path: Path, header: Any) -> None:
    """Write `header` over the file's own, in the same room where it fits."""
    old, data = spoil.split(path)
    if not isinstance(header, str | bytes):
        header = json.dumps(header)
    spoil.write(path, spoil.join(spoil.padded(header, len(old)), data))


def _edited(edit: Edit) -> Callable[[Path], None]:
    def change(path: Path) -> None:
        header, metadata = _parsed(path)
        first, second = list(spoil.tensors_of(path))[:2]
        whole = edit(header, first, second)
        _put(path, {**header, **metadata, **header} if whole is None else whole[0])

    return change


def _retyped(edit: TextEdit) -> Callable[[Path], None]:
    def change(path: Path) -> None:
        header, metadata = _parsed(path)
        _put(path, edit(json.dumps(header | metadata)))

    return change


def _parsed(path: Path) -> tuple[dict[str, Any], dict[str, Any]]:
    """The header's tensors, and its metadata, which stands behind them in what is written."""
    header = json.loads(spoil.split(path)[0])
    metadata = {"__metadata__": header.pop("__metadata__")} if "__metadata__" in header else {}
    return header, metadata


def _length(make: Callable[[int, int], int]) -> Callable[[Path], None]:
    def change(path: Path) -> None:
        data = path.read_bytes()
        length = make(int.from_bytes(data[:8], "little"), len(data))
        spoil.write(path, length.to_bytes(8, "little") + data[8:])

    return change


def _sparse(length: int) -> Callable[[Path], None]:
    """A header of `length` bytes, nearly all of them zeros that take no room on the disk."""

    def change(path: Path) -> None:
        header, data = spoil.split(path)
        path.unlink()
        with open(path, "wb") as file:
            file.write(length.to_bytes(8, "little") + header)
            file.truncate(8 + length + len(data))

    return change


LENGTHS: dict[str, Callable[[Path], None]] = {
    "a length of 0": _length(lambda n, size: 0),
    "a length of 1": _length(lambda n, size: 1),
    "a length of 2": _length(lambda n, size: 2),
    "a length one less": _length(lambda n, size: n - 1),
    "a length eight more": _length(lambda n, size: n + 8),
    "a length of the whole file": _length(lambda n, size: size),
    "a length of all that follows": _length(lambda n, size: size - 8),
    "a length over the format's limit": _length(lambda n, size: 100_000_001),
    "a length of 2**31": _length(lambda n, size: 2**31),
    "a length of 2**63": _length(lambda n, size: 2**63),
    "a length of 2**64 - 1": _length(lambda n, size: 2**64 - 1),
    "a length of 2**64 - 8": _length(lambda n, size: 2**64 - 8),
    "a header of 90 MB": _sparse(90_000_000),
    "a header of 8 GB": _sparse(8 << 30),
}


def _all() -> Iterator[tuple[str, Callable[[Path], None]]]:
    yield from LENGTHS.items()
    for name, edit in EDITS.items():
        yield name, _edited(edit)
    for name, text in TEXTS.items():
        yield name, _retyped(text)


def _case(change: Callable[[Path], None], find: Callable[[Path], Path], listed: bool) -> Change:
    def spoilt(directory: Path) -> None:
        change(find(directory))
        if listed:
            spoil.relist(directory, find(directory))

    return spoilt


def cases() -> Iterator[Case]:
    for name, change in _all():
        for base, find in (("runtime", spoil.last_part), ("source", spoil.main_part)):
            for listed in (False, True):
                label = f"{base}: header: {name}{', listed' if listed else ''}"
                # With a name that is a lie too, it is the name that is told.
                named = listed and name == "a name of a megabyte"
                said = ("no place",) if named else ("model-rank-0-part-",)
                zero = (
                    "zero, written otherwise" if listed and name == "a number minus zero" else None
                )
                yield Case(label, base, _case(change, find, listed), said, loads=zero)
