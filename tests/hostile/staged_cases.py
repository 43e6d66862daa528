"""What a killed save leaves beside a checkpoint, made up: staged files shadow those in their places."""

import json
import os
from collections.abc import Callable, Iterator
from pathlib import Path

from tests.hostile import spoil
from tests.hostile.corpus import Case
from tests.support import edit

PART = "model-rank-0-part-1.safetensors"


def _staged(directory: Path, name: str, own: bool = True) -> Path:
    """Where the save that wrote the manifest, or another one, would keep `name`."""
    found = edit.read_manifest(directory)["save_id"]
    return directory / f".{name}.{found if own else '0' * 16}.tmp"


def _put(
    name: str, make: Callable[[Path, Path], object], own: bool = True
) -> Callable[[Path], None]:
    """`make` gets the staged path of `name`, and the good file of that name."""

    def change(directory: Path) -> None:
        make(_staged(directory, name, own), directory / name)

    return change


def _flipped(path: Path, good: Path) -> None:
    data = good.read_bytes()
    path.write_bytes(data[:-1] + bytes([data[-1] ^ 1]))


def _tuned(path: Path, good: Path) -> None:
    path.write_bytes((path.parents[2] / "good" / "runtime-tuned" / good.name).read_bytes())


def _sparse(size: int) -> Callable[[Path, Path], None]:
    def make(path: Path, good: Path) -> None:
        with open(path, "wb") as file:
            file.truncate(size)

    return make


#: Staged parts that would be read instead of the good one.
SHADOWS: dict[str, Callable[[Path, Path], object]] = {
    "junk": lambda path, good: path.write_bytes(b"junk" * 1000),
    "nothing in it": lambda path, good: path.touch(),
    "a bit flipped": _flipped,
    "cut": lambda path, good: path.write_bytes(good.read_bytes()[:-100]),
    "of a fine-tune": _tuned,
    "a directory": lambda path, good: path.mkdir(),
    "a pipe": lambda path, good: os.mkfifo(path),
    "a link to endless zeros": lambda path, good: path.symlink_to("/dev/zero"),
    "a terabyte of zeros": _sparse(1 << 40),
}
#: Journals and side files: they say what to remove and what to move, which a load does not do.
BESIDE: dict[str, tuple[str, Callable[[Path, Path], object]]] = {
    "a journal of junk": ("journal", lambda path, good: path.write_bytes(b"\xff{")),
    "a journal that is a pipe": ("journal", lambda path, good: os.mkfifo(path)),
    "a journal that is a directory": ("journal", lambda path, good: path.mkdir()),
    "a journal of endless zeros": ("journal", lambda path, good: path.symlink_to("/dev/zero")),
    "a journal of a gigabyte": ("journal", _sparse(1 << 30)),
    "a journal of a terabyte": ("journal", _sparse(1 << 40)),
    "a journal 100,000 levels deep": (
        "journal",
        lambda path, good: path.write_text("[" * 100_000 + "]" * 100_000),
    ),
    "a journal of numbers": (
        "journal",
        lambda path, good: path.write_text(json.dumps({"files": [1], "replaced": [None, 2.5]})),
    ),
    "a journal of lists": (
        "journal",
        lambda path, good: path.write_text(json.dumps({"files": [[]], "replaced": {"a": 1}})),
    ),
    "a journal that leads out": (
        "journal",
        lambda path, good: path.write_text(json.dumps({"files": ["../x"], "replaced": ["/etc/x"]})),
    ),
    "side files that are a file": ("side-files", lambda path, good: path.write_text("x")),
    "side files that are a pipe": ("side-files", lambda path, good: os.mkfifo(path)),
    "side files that are endless": ("side-files", lambda path, good: path.symlink_to("/dev/zero")),
    "side files that are the machine's": ("side-files", lambda path, good: path.symlink_to("/")),
    "no side files": ("side-files", lambda path, good: path.mkdir()),
}


def _unfinished(path: Path, good: Path) -> None:
    path.mkdir()
    (path / "config.json").write_text("{}")


def cases() -> Iterator[Case]:
    base = "runtime"
    for name, make in SHADOWS.items():
        yield Case(f"staged: a part, {name}", base, _put(PART, make), (PART,))
        reason = "of a save that was never published: in nobody's way"
        another = _put(PART, make, own=False)
        yield Case(f"staged: another save's part, {name}", base, another, (), loads=reason)
    for name, (staged, make) in BESIDE.items():
        reason = "a load follows no journal, and moves no side files"
        yield Case(f"staged: {name}", base, _put(staged, make), (), loads=reason)
    change = _put("side-files", _unfinished)
    yield Case("staged: side files that wait", base, change, ("config.json", "Complete it"))
    moved = _put(PART, lambda path, good: good.rename(path))
    yield Case("staged: a part, where it waits", base, moved, (), loads="killed after its commit")
    stranger = "model-rank-0-part-7.safetensors"

    def explained(directory: Path) -> None:
        (directory / stranger).hardlink_to(spoil.main_part(directory))
        text = json.dumps({"files": [], "replaced": [stranger]})
        _staged(directory, "journal").write_text(text)

    waits = "the journal says that an earlier save's part is still to be removed"
    yield Case("staged: a part that is to go", base, explained, (), loads=waits)
