"""Copy what a model directory holds beside its weights: config, tokenizer, templates, remote code."""

import fnmatch
import os
from collections.abc import Iterable, Iterator
from pathlib import Path

from .checkpoint import lock, staging
from .checkpoint.checksum import Hash

#: Files that hold weights, or speak of files that do.
WEIGHTS = (
    "*.safetensors",
    "*.safetensors.index.json",
    "*.bin",
    "*.bin.index.json",
    "*.pt",
    "*.pth",
    "*.gguf",
    "*.onnx",
    "*.h5",
    "*.msgpack",
    "*.tensors",
    "sharded_state.json",
)
#: Folders of a hub's own book-keeping, or of weights in another format.
SKIPPED_FOLDERS = frozenset({".git", ".cache", "original", "onnx", "__pycache__"})

#: What is taken from the model although the tokenizer's directory has it too.
_OF_THE_MODEL = ("config.json", "generation_config.json", "*.py")

#: Bytes that are copied at a time.
_STEP = 1 << 20


def stage(
    model: Path | None, tokenizer: Path | None, target: Path, save_id: str
) -> dict[str, tuple[int, str]]:
    """Stage every file of `model` that holds no weights, and those of `tokenizer` in their stead.

    Links are resolved. What `target` has already is not staged again; where it is itself one of the two,
    its files are there. Returns size in bytes and XXH3 checksum of each file by relative path, `/`
    between folders. Raises `OSError`.
    """
    chosen = dict(_files(model, target))
    for relative, path in _files(tokenizer, target):
        of_model = any(fnmatch.fnmatch(path.name, pattern) for pattern in _OF_THE_MODEL)
        if not (of_model and relative in chosen):
            chosen[relative] = path
    root = staging.staged(target, staging.SIDE_FILES, save_id)
    found = {}
    for relative, path in sorted(chosen.items()):
        there = target / relative
        if there.is_file() and not there.is_symlink() and _equal(path, there):
            found[relative.as_posix()] = _read(path, None)
        else:
            (root / relative).parent.mkdir(parents=True, exist_ok=True)
            found[relative.as_posix()] = _copy(path, root / relative)
    return found


def _files(source: Path | None, target: Path) -> Iterator[tuple[Path, Path]]:
    """The files of `source` that hold no weights, by relative path; none that lie in `target`."""
    if source is None:
        return
    inside = target.resolve()
    for path in sorted(source.rglob("*")):
        relative = path.relative_to(source)
        if SKIPPED_FOLDERS & set(relative.parts) or not path.is_file():
            continue
        if any(fnmatch.fnmatch(path.name, pattern) for pattern in WEIGHTS):
            continue
        if path.name == lock.FILE_NAME or any(map(staging.is_staged, relative.parts)):
            continue
        if source.resolve() != inside and (source / relative.parts[0]).resolve() == inside:
            continue
        yield relative, path


def _equal(one: Path, other: Path) -> bool:
    if one.stat().st_size != other.stat().st_size:
        return False
    return os.path.samefile(one, other) or _read(one, None) == _read(other, None)


def _copy(path: Path, to: Path) -> tuple[int, str]:
    fd = os.open(to, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o666)
    try:
        result = _read(path, fd)
        os.fsync(fd)
    finally:
        os.close(fd)
    return result


def _read(path: Path, copy_to: int | None) -> tuple[int, str]:
    """Size and checksum of a file, whose bytes also go to the file descriptor `copy_to`, if given."""
    digest, size = Hash(), 0
    for data in _chunks(path):
        digest.update(data)
        size += len(data)
        rest = memoryview(data)
        while copy_to is not None and rest:
            rest = rest[os.write(copy_to, rest) :]
    return size, str(digest.hexdigest())


def _chunks(path: Path) -> Iterable[bytes]:
    with open(path, "rb") as file:
        while data := file.read(_STEP):
            yield data
