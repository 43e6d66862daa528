"""What lies in the directory is not what a save left: other files, links, pipes, mixtures of saves."""

import os
import shutil
import socket
from collections.abc import Callable, Iterator
from pathlib import Path

from tests.hostile import spoil
from tests.hostile.byte_cases import FILES
from tests.hostile.corpus import Case
from tests.support import edit

#: What is put in the place of a file; `aside` is where the file itself has gone.
INSTEAD: dict[str, Callable[[Path, Path], object]] = {
    "nothing": lambda path, aside: None,
    "a directory": lambda path, aside: path.mkdir(),
    "a directory with the file": lambda path, aside: (path.mkdir(), shutil.copy(aside, path)),
    "a pipe": lambda path, aside: os.mkfifo(path),
    "a link to a pipe": lambda path, aside: (
        os.mkfifo(f"{aside}.pipe"),
        path.symlink_to(f"{aside}.pipe"),
    ),
    "a socket": lambda path, aside: _socket(path),
    "a link to nothing": lambda path, aside: path.symlink_to(f"{aside}.none"),
    "a link to itself": lambda path, aside: path.symlink_to(path.name),
    "a link to its directory": lambda path, aside: path.symlink_to("."),
    "a link to endless zeros": lambda path, aside: path.symlink_to("/dev/zero"),
    "a link to an empty device": lambda path, aside: path.symlink_to("/dev/null"),
    "a link to endless noise": lambda path, aside: path.symlink_to("/dev/urandom"),
    "a link to a file of the system": lambda path, aside: path.symlink_to("/proc/self/maps"),
    "a link to another model's config": lambda path, aside: path.symlink_to("config.json"),
}


def _socket(path: Path) -> None:
    """Bound under a short name, because a socket's path may have 108 bytes at most."""
    folder = os.open(path.parent, os.O_RDONLY)
    with socket.socket(socket.AF_UNIX) as made:
        made.bind(f"/proc/self/fd/{folder}/{path.name}")
    os.close(folder)


def _instead(
    find: Callable[[Path], Path], put: Callable[[Path, Path], object]
) -> Callable[[Path], None]:
    def change(directory: Path) -> None:
        path = find(directory)
        aside = directory.parent / f"{directory.name}.aside"
        path.rename(aside)
        put(path, aside)

    return change


def _link_out(directory: Path) -> None:
    """Every file is a link to one elsewhere, as in a snapshot of the hub's cache."""
    elsewhere = directory.parent / f"{directory.name}.blobs"
    elsewhere.mkdir()
    for number, path in enumerate(sorted(directory.iterdir())):
        path.rename(elsewhere / str(number))
        path.symlink_to(f"../{elsewhere.name}/{number}")


def other(directory: Path, name: str) -> Path:
    """The good directory `name`: the yard keeps all of them beside each other."""
    return directory.parents[1] / "good" / name.replace(" ", "-")


def _take(name: str, *files: str, differ: bool = True) -> Callable[[Path], None]:
    """Files of the good directory `name` in the place of this one's; `files` are patterns."""

    def change(directory: Path) -> None:
        taken = 0
        for pattern in files:
            for path in sorted(other(directory, name).glob(pattern)):
                data = path.read_bytes()
                target = directory / path.name
                taken += not target.exists() or target.read_bytes() != data
                target.unlink(missing_ok=True)
                target.write_bytes(data)
        assert taken or not differ, "nothing changed"

    return change


def _swap(first: Callable[[Path], Path], second: Callable[[Path], Path]) -> Callable[[Path], None]:
    def change(directory: Path) -> None:
        a, b, aside = first(directory), second(directory), directory / "aside"
        a.rename(aside)
        b.rename(a)
        aside.rename(b)

    return change


def _rename(to: Callable[[str], str]) -> Callable[[Path], None]:
    def change(directory: Path) -> None:
        path = spoil.main_part(directory)
        path.rename(directory / to(path.name))

    return change


def _more(name: str, find: Callable[[Path], Path] = spoil.main_part) -> Callable[[Path], None]:
    """One file more: a copy of another."""
    return lambda directory: (directory / name).hardlink_to(find(directory))


def _junk(name: str) -> Callable[[Path], None]:
    def change(directory: Path) -> None:
        (directory / name).write_bytes(b"junk" * 1000)

    return change


def _listed_as(name: str, there: bool = False) -> Callable[[Path], None]:
    """The manifest calls the first part `name`; where `there`, the part really lies there."""

    def change(directory: Path) -> None:
        path = spoil.main_part(directory)

        def rename(manifest: spoil.Data) -> None:
            rank = manifest["ranks"][0]
            rank["files"][name] = rank["files"].pop(path.name)
            for entry in rank["tensors"].values():
                if entry["file"] == path.name:
                    entry["file"] = name

        spoil.edit_manifest(directory, rename)
        if there:
            target = directory / name
            target.parent.mkdir(exist_ok=True)
            path.rename(target)

    return change


NAMES = {
    "up": "../elsewhere.safetensors",
    "up and back": "x/../model.safetensors",
    "below": "below/model.safetensors",
    "absolute": "/tmp/model.safetensors",
    "a dot": ".",
    "two dots": "..",
    "nothing": "",
    "with NUL": "model\0.safetensors",
    "with a newline": "model\n.safetensors",
    "with an escape": "model\x1b[2J.safetensors",
    "with a backslash": "..\\model.safetensors",
    "with a surrogate": "model\ud800.safetensors",
    "of 300 letters": "m" * 300,
    "of a megabyte": "m" * 2**20,
    "that is the manifest's": edit.MANIFEST,
    "that is the config's": "config.json",
    "with a slash at its end": "model-rank-0-part-0.safetensors/",
    "of a device": "/dev/zero",
}


def _places() -> Iterator[Case]:
    for base in ("runtime", "source"):
        for file, find in FILES.items():
            if file == "last part" and base == "source":
                continue
            for name, put in INSTEAD.items():
                said = edit.MANIFEST if file == "manifest" else ".safetensors"
                label = f"{base}: {name} in place of the {file}"
                yield Case(label, base, _instead(find, put), (said,))
        for name, text in NAMES.items():
            there = name in ("up", "below")
            label = f"{base}: a part's name {name}"
            yield Case(label, base, _listed_as(text, there), (edit.MANIFEST,))


def _only_parts(directory: Path) -> None:
    """As copied by somebody who knows upstream's names only."""
    (directory / edit.MANIFEST).unlink()
    for path in directory.glob("hidden-state-*"):
        path.unlink()


def _mixtures() -> Iterator[Case]:
    base, manifest, part = "runtime", edit.MANIFEST, "model-rank-0-part-"
    tuned, biased = "runtime tuned", "biased"
    for number in range(3):
        file = f"{part}{number}.safetensors"
        for name in (tuned, biased) if number < 2 else (tuned,):
            yield Case(f"{base}: {file} of {name}", base, _take(name, file), (part,))
    for name in (tuned, biased, "source tuned"):
        said = (part,) if name == tuned else (".safetensors",)
        yield Case(f"{base}: all parts of {name}", base, _take(name, "*.safetensors"), said)
        # Another model's config is told before its parts are.
        said = (part,) if name == tuned else ("saved", "here")
        yield Case(f"{base}: the manifest of {name}", base, _take(name, manifest), said)
    yield Case(
        f"{base}: the manifest as source",
        base,
        _take("runtime as source", manifest),
        (".safetensors",),
    )
    for name in ("runtime", "source"):
        # All that stock vLLM would have written; nothing in it could prove a byte.
        yield Case(f"{name}: nothing but the parts", name, _only_parts, (edit.MANIFEST, part))
    yield Case("source: a fine-tune's part", "source", _take("source tuned", "model-*"), (part,))
    yield Case("source: a fine-tune's manifest", "source", _take("source tuned", manifest), (part,))
    for name in (biased, "source tuned"):
        change = _take(name, "config.json")
        yield Case(f"{base}: config of {name}", base, change, ("saved", "here"))
    first, last, hidden = spoil.main_part, spoil.last_part, spoil.hidden_part
    yield Case(f"{base}: two parts swapped", base, _swap(first, last), (part,))
    yield Case(
        f"{base}: part and hidden part swapped", base, _swap(first, hidden), (".safetensors",)
    )
    yield Case(
        "source: part and hidden part swapped", "source", _swap(first, hidden), (".safetensors",)
    )
    yield Case("a part in capitals", base, _rename(str.upper), (part,))
    yield Case("a part's name with a space", base, _rename(lambda name: f"{name} "), (part,))
    yield Case("a part more", base, _more(f"{part}7.safetensors"), (f"{part}7",))
    yield Case(
        "a part of another number more", base, _more(f"{part}03.safetensors"), (f"{part}03",)
    )


def _harmless() -> Iterator[Case]:
    """Changed, and the same: what the model reads is there, and says so."""
    base = "runtime"
    copies = "the same bytes, of another save of the same model"
    for name in ("model-rank-0-part-1.safetensors", "hidden-*", "*.safetensors"):
        change = _take("runtime again", name, differ=False)
        yield Case(f"{name} of the same model", base, change, (), loads=copies)
    whole = _take("runtime tuned", "*.safetensors", edit.MANIFEST)
    reason = "a whole checkpoint of one save; which one is asked for with `source`"
    yield Case("all of a fine-tune", base, whole, (), loads=reason, like="runtime tuned")
    yield Case(
        "links into a hub's cache", base, _link_out, (), loads="hub caches are made of links"
    )
    stray = "nothing reads it: a rank that this world does not have, or what a killed save left"
    for name in ("model-rank-1-part-0.safetensors", f".{edit.MANIFEST}.tmp", "notes.txt"):
        yield Case(f"a stray {name}", base, _junk(name), (), loads=stray)


def cases() -> Iterator[Case]:
    for base in ("runtime", "source", "auto", "tied", "fp8"):
        yield Case(f"{base}: untouched", base, lambda directory: None, (), loads="nothing changed")
    yield from _places()
    yield from _mixtures()
    yield from _harmless()
