"""Damage that knows nothing of the format: files cut, filled, flipped, shifted."""

from collections.abc import Callable, Iterator
from pathlib import Path

from tests.hostile import spoil
from tests.hostile.corpus import Case
from tests.hostile.goods import BASES

#: What becomes of a file's bytes. `end` is where its header ends (a manifest: half of it).
Damage = Callable[[bytes, int], bytes]

FILES: dict[str, Callable[[Path], Path]] = {
    "first part": spoil.main_part,
    "last part": spoil.last_part,
    "hidden part": spoil.hidden_part,
    "manifest": spoil.manifest_file,
}


def _cut(at: Callable[[int, int], int]) -> Damage:
    return lambda data, end: data[: at(len(data), end)]


def _fill(start: Callable[[int, int], int], count: int | None, byte: int = 0) -> Damage:
    """`count` bytes become `byte`, but for the last one that would not change: it is inverted."""

    def damage(data: bytes, end: int) -> bytes:
        first = start(len(data), end)
        last = len(data) if count is None else min(len(data), first + count)
        filled = bytearray(data[:first] + bytes([byte]) * (last - first) + data[last:])
        if filled == data:
            filled[last - 1] ^= 0xFF
        return bytes(filled)

    return damage


def _flip(at: Callable[[int, int], int], bit: int) -> Damage:
    def damage(data: bytes, end: int) -> bytes:
        place = min(at(len(data), end), len(data) - 1)
        return data[:place] + bytes([data[place] ^ (1 << bit)]) + data[place + 1 :]

    return damage


def _shift(insert: bool) -> Damage:
    """One byte more or less in the middle of the data; the size stays."""

    def damage(data: bytes, end: int) -> bytes:
        middle = (end + len(data)) // 2
        if insert:
            return data[:middle] + b"\x5a" + data[middle:-1]
        return data[:middle] + data[middle + 1 :] + b"\x5a"

    return damage


DAMAGES: dict[str, Damage] = {
    "empty": _cut(lambda size, end: 0),
    "cut after 1 byte": _cut(lambda size, end: 1),
    "cut after 7 bytes": _cut(lambda size, end: 7),
    "cut after 8 bytes": _cut(lambda size, end: 8),
    "cut after 9 bytes": _cut(lambda size, end: 9),
    "cut in the header": _cut(lambda size, end: end // 2),
    "cut before the header's end": _cut(lambda size, end: end - 1),
    "cut after the header": _cut(lambda size, end: end),
    "cut in the middle": _cut(lambda size, end: (end + size) // 2),
    "cut on a page": _cut(lambda size, end: (size - 1) // 4096 * 4096),
    "cut before the last byte": _cut(lambda size, end: size - 1),
    "a zero byte more": lambda data, end: data + b"\0",
    "a page of zeros more": lambda data, end: data + bytes(4096),
    "text after the end": lambda data, end: data + b"\n{}",
    "itself once more": lambda data, end: data + data,
    "all zeros": _fill(lambda size, end: 0, None),
    "all ones": _fill(lambda size, end: 0, None, 0xFF),
    "zeros for a length": _fill(lambda size, end: 0, 8),
    "ones for a length": _fill(lambda size, end: 0, 8, 0xFF),
    "zeros in the header": _fill(lambda size, end: end // 4, 64),
    "spaces in the header": _fill(lambda size, end: end // 4, 64, 0x20),
    "zeros at the first bytes": _fill(lambda size, end: end, 512),
    "zeros on a page": _fill(lambda size, end: (end + size) // 2, 4096),
    "zeros at the end": _fill(lambda size, end: size - 16, None),
    "a bit of the length": _flip(lambda size, end: 0, 0),
    "a high bit of the length": _flip(lambda size, end: 6, 5),
    "the top bit of the length": _flip(lambda size, end: 7, 7),
    "a bit at the header's start": _flip(lambda size, end: 8, 0),
    "a bit at the header's end": _flip(lambda size, end: end - 1, 0),
    "a bit of the first value": _flip(lambda size, end: end, 0),
    "a bit of the last value": _flip(lambda size, end: size - 1, 6),
    "a byte more in the middle": _shift(True),
    "a byte less in the middle": _shift(False),
}


def _anywhere(name: str) -> Damage:
    """A flipped bit at a place that `name` decides: every second one in the header."""
    dice = spoil.dice(name)
    in_header, where, bit = dice.random() < 0.5, dice.random(), dice.randrange(8)

    def place(size: int, end: int) -> int:
        return int(8 + where * (end - 8)) if in_header else int(end + where * (size - end))

    return _flip(place, bit)


def _change(find: Callable[[Path], Path], damage: Damage) -> Callable[[Path], None]:
    def change(directory: Path) -> None:
        path = find(directory)
        data = path.read_bytes()
        text = path.suffix == ".json"
        end = len(data) // 2 if text else 8 + int.from_bytes(data[:8], "little")
        spoil.write(path, damage(data, end))

    return change


def cases() -> Iterator[Case]:
    for base in BASES:
        for file, find in FILES.items():
            if file == "last part" and base in ("source", "tied"):
                continue  # They have one part.
            damages = dict(DAMAGES) if base in ("runtime", "source") else {}
            for number in range(16):
                name = f"bit {number}"
                damages[name] = _anywhere(f"{base}/{file}/{name}")
            for name, damage in damages.items():
                word = "sharded_state.json" if file == "manifest" else ".safetensors"
                yield Case(f"{base}: {file}: {name}", base, _change(find, damage), (word,))
