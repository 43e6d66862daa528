"""Manifests that lie or are none: their text, and each of their fields.

Fields are changed with the checksum as it was, and with one made to fit: then only what the field says
can tell. A lie that gives another valid checkpoint is in `meaning_cases`.
"""

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from tests.hostile import spoil
from tests.hostile.corpus import Case
from tests.support import edit

#: What a field becomes, by name.
WRONG: dict[str, Any] = {
    "null": None,
    "true": True,
    "minus one": -1,
    "a fraction": 1.5,
    "a huge integer": 10**40,
    "NaN": float("nan"),
    "infinity": float("inf"),
    "text": "x\u0000\n\ud800",
    "a list": [[]],
    "an object": {"x": {}},
}
#: Paths into the manifest: `*` is the first key. After each, the values that are right or harmless there.
FIELDS: dict[tuple[str | int, ...], set[str]] = {
    ("format",): set(),
    ("version",): set(),
    ("written_by",): set(),
    ("written_by", "vllm"): {"text"},
    ("binding",): set(),
    ("binding", "world"): set(),
    ("binding", "world", "tensor_parallel_size"): set(),
    ("binding", "model"): set(),
    ("binding", "model", "config.hidden_size"): set(),
    ("binding", "model", "quantization"): set(),
    ("binding", "runtime"): set(),
    ("binding", "runtime", "vllm"): set(),
    ("tied_word_embeddings",): {"true"},
    ("ranks",): set(),
    ("ranks", 0): set(),
    ("ranks", 0, "rank"): set(),
    ("ranks", 0, "files"): set(),
    ("ranks", 0, "files", "*"): set(),
    ("ranks", 0, "units"): set(),
    ("ranks", 0, "units", "*"): set(),
    ("ranks", 0, "units", "model.norm", "layout"): set(),
    ("ranks", 0, "units", "model.layers.0.mlp.down_proj", "method"): set(),
    ("ranks", 0, "kernels"): set(),
    ("ranks", 0, "kernels", "*"): set(),
    ("ranks", 0, "kernel_environment"): {"text"},
    ("ranks", 0, "tensors"): set(),
    ("ranks", 0, "tensors", "*"): set(),
    ("ranks", 0, "tensors", "*", "file"): set(),
    ("ranks", 0, "tensors", "*", "key"): set(),
    ("ranks", 0, "tensors", "*", "kind"): set(),
    ("ranks", 0, "tensors", "*", "dtype"): set(),
    ("ranks", 0, "tensors", "*", "shape"): set(),
    ("ranks", 0, "tensors", "*", "stage"): set(),
    ("ranks", 0, "tensors", "*", "checksum"): set(),
    ("ranks", 0, "tensors", "*", "aliases"): set(),
    ("ranks", 0, "tensors", "*", "owner"): {"null"},
    ("ranks", 0, "tensors", "*", "replace"): {"true"},
    ("ranks", 0, "values"): set(),
    ("ranks", 0, "values", "*"): set(),
    ("ranks", 0, "values", "*", "value"): set(),
    ("ranks", 0, "values", "*", "stage"): set(),
    ("ranks", 0, "values", "*", "owner"): {"null"},
    ("checksum",): set(),
}
#: Fields that a manifest may leave out: without them it says less, and nothing wrong.
OPTIONAL = {"aliases", "owner", "replace", "kernels", "kernel_environment", "values", "vllm"}


def _find(manifest: Any, path: tuple[str | int, ...]) -> tuple[Any, Any]:
    """The container of a field, and its key there."""
    *outer, last = path
    for step in outer:
        manifest = manifest[next(iter(manifest)) if step == "*" else step]
    return manifest, next(iter(manifest)) if last == "*" else last


def _set(path: tuple[str | int, ...], value: Any) -> Callable[[spoil.Data], None]:
    def change(manifest: spoil.Data) -> None:
        container, key = _find(manifest, path)
        container[key] = value

    return change


def _drop(path: tuple[str | int, ...]) -> Callable[[spoil.Data], None]:
    def change(manifest: spoil.Data) -> None:
        container, key = _find(manifest, path)
        del container[key]

    return change


def _fields() -> Iterator[tuple[str, Callable[[spoil.Data], None]]]:
    for path, right in FIELDS.items():
        name = "/".join(map(str, path))
        for what, value in WRONG.items():
            if what not in right:
                yield f"{name} is {what}", _set(path, value)
        if path[-1] not in (*OPTIONAL, "*", 0):
            yield f"{name} is gone", _drop(path)
    levels = [(), ("ranks", 0), ("ranks", 0, "units", "*"), ("ranks", 0, "values", "*")]
    for path in [*levels, ("ranks", 0, "tensors", "*")]:
        yield f"{'/'.join(map(str, path))} has an unknown field", _set((*path, "stranger"), 1)


#: The text, changed; without a checksum that fits.
TEXTS: dict[str, Callable[[str], str | bytes]] = {
    "a byte order mark": lambda text: b"\xef\xbb\xbf" + text.encode(),
    "UTF-16": lambda text: text.encode("utf-16"),
    "Latin 1": lambda text: text.replace('"format"', '"f\xf6rmat"', 1).encode("latin-1"),
    "a number": lambda text: "1",
    "null": lambda text: "null",
    "a list of it": lambda text: f"[{text}]",
    "a string of it": lambda text: '"' + text.replace('"', '\\"').replace("\n", " ") + '"',
    "an empty object": lambda text: "{}",
    "nothing but spaces": lambda text: " " * 1000,
    "a thousand levels": lambda text: "[" * 1000 + "]" * 1000,
    "100,000 levels": lambda text: "[" * 100_000 + "]" * 100_000,
    "100,000 levels of objects": lambda text: '{"a":' * 100_000 + "1" + "}" * 100_000,
    "a million open brackets": lambda text: "[" * 1_000_000,
    "levels in a field": lambda text: "{" + '"x": ' + "[" * 5000 + "]" * 5000 + "," + text[1:],
    "a duplicate field": lambda text: text.replace('"ranks":', '"ranks": [], "ranks":', 1),
    "a duplicate field of a tensor": lambda text: text.replace(
        '"dtype":', '"dtype": "I8", "dtype":', 1
    ),
    "its fields twice": lambda text: "{" + text[1 : text.rindex("}")] + "," + text[1:],
    "text after the end": lambda text: text + "{}",
    "itself twice": lambda text: text + text,
    "a zero byte after the end": lambda text: text + "\0",
    "a comment": lambda text: text.replace("{", "{ // comment\n", 1),
    "a comma after the last": lambda text: text[: text.rindex("}")] + ",}",
    "single quotes": lambda text: text.replace('"', "'"),
    "a number of 100,000 digits": lambda text: text.replace(
        '"version": ', '"version": ' + "9" * 100_000, 1
    ),
    "1e999": lambda text: text.replace('"rank": 0', '"rank": 1e999', 1),
    "NaN": lambda text: text.replace('"rank": 0', '"rank": NaN', 1),
    "minus zero": lambda text: text.replace('"rank": 0', '"rank": -0', 1),
    "a key of ten megabytes": lambda text: '{"' + "a" * 10_000_000 + '": 1,' + text[1:],
    "a pickle": lambda text: b"\x80\x04\x95\x10\x00\x00\x00\x00\x00\x00\x00}\x94.",
}


def _text(change: Callable[[str], str | bytes]) -> Callable[[Path], None]:
    def spoilt(directory: Path) -> None:
        path = spoil.manifest_file(directory)
        data = change(path.read_text())
        spoil.write(path, data if isinstance(data, bytes) else data.encode())

    return spoilt


def _signed(change: Callable[[str], str | bytes]) -> Callable[[Path], None]:
    """The text without its first line, the checksum, changed; and one that fits."""

    def spoilt(directory: Path) -> None:
        path = spoil.manifest_file(directory)
        before = path.read_bytes()
        text = change("{\n" + before.decode().split("\n", 2)[2])
        edit.sign(directory, text if isinstance(text, bytes) else text.encode())
        assert path.read_bytes() != before, "nothing changed"

    return spoilt


def _sparse(size: int, keep: bool) -> Callable[[Path], None]:
    """A file of `size` bytes that takes no room on the disk, the good text at its start or not."""

    def spoilt(directory: Path) -> None:
        path = spoil.manifest_file(directory)
        text = path.read_bytes() if keep else b""
        path.unlink()
        with open(path, "wb") as file:
            file.write(text)
            file.truncate(size)

    return spoilt


def _edited(change: Callable[[spoil.Data], None], listed: bool) -> Callable[[Path], None]:
    edited = spoil.edit_manifest if listed else spoil.edit_stale
    return lambda directory: edited(directory, change)


def cases() -> Iterator[Case]:
    said = (edit.MANIFEST,)
    for base in ("runtime", "source"):
        for name, text in TEXTS.items():
            yield Case(f"{base}: manifest text: {name}", base, _text(text), said)
            yield Case(f"{base}: manifest text: {name}, listed", base, _signed(text), said)
        for size in (1 << 30, 1 << 40):
            for keep in (True, False):
                name = f"{size >> 30} GB of zeros{' after it' if keep else ''}"
                yield Case(f"{base}: manifest text: {name}", base, _sparse(size, keep), said)
    for base in ("runtime", "fp8"):
        for name, change in _fields():
            yield Case(f"{base}: manifest: {name}", base, _edited(change, False), said)
            if not name.startswith("checksum"):
                label = f"{base}: manifest: {name}, listed"
                yield Case(label, base, _edited(change, True), ())
