"""Files of a save that is not finished: their names, and how they get their places.

Until its last step a save keeps every file under a name of its own, `.{name}.{save_id}.tmp`, with a
`save_id` that no other save has. It is published when its manifest is renamed into place; whatever is
left to do after that, anyone who may write can do (`complete`), and a reader need not wait for it
(`locate`). Whatever an unpublished save leaves is in nobody's way, and the next one removes it.

Beside the parts a save stages a folder `side-files`, whose files belong beside the parts, and the
`journal`: which files it brings and which it replaces.
"""

import errno
import json
import os
import re
import secrets
import shutil
import stat
import sys
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

from vllm_sharded_state.errors import IncompleteError, SaveError, listed

from . import manifest
from .lock import SaveLock

#: Staged names that are no part.
SIDE_FILES = "side-files"
JOURNAL = "journal"

#: Largest journal that is read: one of a million parts is smaller.
_MAX_JOURNAL = 64 << 20

_STAGED = re.compile(r"\.(?P<name>.+)\.(?P<save_id>[0-9a-f]{16})\.tmp", re.DOTALL)


def new_id() -> str:
    """An id for a save: 16 hexadecimal digits that no other save has."""
    return secrets.token_hex(8)


def staged(directory: Path, name: str, save_id: str) -> Path:
    """Where the save `save_id` keeps its file `name` until it is published."""
    return directory / f".{name}.{save_id}.tmp"


def locate(directory: Path, name: str, save_id: str) -> Path:
    """Where the file `name` of the published save `save_id` lies: its staged place, or its own.

    A save that completes itself meanwhile may rename it between this call and the opening.
    """
    early = staged(directory, name, save_id)
    return early if early.exists() else directory / name


def is_staged(name: str) -> bool:
    """Whether a file name is one of a save that is not finished."""
    return _STAGED.fullmatch(name) is not None


def write_whole(path: Path, data: bytes) -> None:
    """Write a new file and flush it to the device. Raises `OSError`."""
    fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o666)
    try:
        rest = memoryview(data)
        while rest:
            rest = rest[os.write(fd, rest) :]
        os.fsync(fd)
    finally:
        os.close(fd)


def flush_directory(directory: Path) -> None:
    """Flush the names in `directory` to the device, where its file system can do that."""
    fd = os.open(directory, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        os.fsync(fd)
    except OSError as error:
        if error.errno not in (errno.EINVAL, errno.ENOTSUP):
            raise
    finally:
        os.close(fd)


def write_journal(directory: Path, save_id: str, files: set[str], replaced: set[str]) -> None:
    """Note what `complete` needs: the files of the save, and those of earlier saves to be removed."""
    data = {"files": sorted(files), "replaced": sorted(replaced)}
    write_whole(staged(directory, JOURNAL, save_id), json.dumps(data).encode())


def place(directory: Path, save_id: str, files: Iterable[str], replaced: Iterable[str]) -> None:
    """Give staged `files` of a published save their names, after removing those of earlier saves.

    All that is old goes first: so whoever reads the parts without the manifest, as stock vLLM does,
    finds some of one save, which is an error to it, and never some of two. Can be repeated after it was
    interrupted. Raises `OSError`.
    """
    files = set(files)
    waiting = sorted(name for name in files if staged(directory, name, save_id).exists())
    old = (set(replaced) - files) | set(waiting)  # what was renamed already is not old
    gone = [name for name in sorted(old) if _unlink(directory / name)]
    if gone:
        flush_directory(directory)
    for name in waiting:
        os.rename(staged(directory, name, save_id), directory / name)


def place_side_files(directory: Path, save_id: str) -> None:
    """Move the staged side files to their places. Raises `OSError`, `SaveError` for one out of here."""
    root = staged(directory, SIDE_FILES, save_id)
    if root.is_symlink() or not root.is_dir():
        return  # No save made that: what a link leads to is somebody else's.
    for folder, _, names in os.walk(root, topdown=False, onerror=_raise):
        target = directory / Path(folder).relative_to(root)
        if not target.resolve().is_relative_to(directory.resolve()):
            raise SaveError(
                f"{target} leads out of {directory}, and files of the model belong there.\n"
                "Remove that link, or save into another directory."
            )
        if names:
            target.mkdir(parents=True, exist_ok=True)
            for name in sorted(names):
                os.replace(Path(folder, name), target / name)
            flush_directory(target)
        os.rmdir(folder)


def waiting_side_files(directory: Path, save_id: str) -> list[str]:
    """Side files of the published save that a kill kept from their places, by relative path."""
    root = staged(directory, SIDE_FILES, save_id)
    if root.is_symlink():
        return []
    return sorted(str(path.relative_to(root)) for path in root.rglob("*") if path.is_file())


def refuse_waiting(directory: Path, save_id: str) -> None:
    """Raise `IncompleteError` where files beside the weights may still be those of an earlier save."""
    waiting = waiting_side_files(directory, save_id)
    if waiting:
        raise IncompleteError(
            f"A save into {directory} was killed in its last step: its weights can be read, but these "
            f"files are still those of the checkpoint before it:\n{listed(waiting)}\n"
            f"Complete it: python -m vllm_sharded_state.checkpoint.staging {directory}"
        )


def waiting_removal(directory: Path, save_id: str) -> set[str]:
    """Files of an earlier save that the published one has yet to remove.

    None where there is no journal, or no readable one: then nothing explains such files.
    """
    try:
        return _read_journal(staged(directory, JOURNAL, save_id))[1]
    except (OSError, SaveError):
        return set()


def end(directory: Path, save_id: str) -> None:
    """Remove the journal of a save whose files are all in place: nothing is left to do."""
    flush_directory(directory)
    _unlink(staged(directory, JOURNAL, save_id))


def discard(directory: Path, save_id: str) -> None:
    """Remove all that an unpublished save staged. Raises `OSError`."""
    for _, found, path in _leftovers(directory):
        if found == save_id:
            _remove(path)


def recover(directory: Path) -> None:
    """Complete a published save that was killed, and remove what unpublished ones left.

    Only for who holds the lock: what it removes could else belong to a save that is running. Raises
    `OSError`, and `SaveError` for a journal that no save wrote.
    """
    leftovers = list(_leftovers(directory))
    if not leftovers:
        return
    journals = {save_id for name, save_id, _ in leftovers if name == JOURNAL}
    published = published_id(directory) if journals else None
    if published in journals:
        assert published is not None
        files, replaced = _read_journal(staged(directory, JOURNAL, published))
        place_side_files(directory, published)
        place(directory, published, files, replaced)
        end(directory, published)
    for _, _, path in leftovers:
        _remove(path)


def complete(directory: Path) -> None:
    """Do what a killed save left to do in `directory`. Raises `SaveError` while another one runs."""
    lock = SaveLock(directory)
    lock.take()
    try:
        recover(directory)
    finally:
        lock.release(remove=True)


def listed_files(directory: Path) -> set[str]:
    """The parts of all ranks that the manifest in `directory` lists; none where it is unreadable."""
    try:
        found = {name for rank in _manifest(directory)["ranks"] for name in rank["files"]}
    except (KeyError, TypeError):
        return set()
    return {name for name in found if _is_plain(name)}


def published_id(directory: Path) -> str | None:
    """The id of the save whose manifest is in place. None where there is no readable one.

    Of whatever version: what a newer one left must not be taken for the remains of a dead save.
    """
    found = _manifest(directory).get("save_id")
    return found if isinstance(found, str) else None


def _manifest(directory: Path) -> dict[str, Any]:
    try:
        data = _read_json(directory / manifest.FILE_NAME, manifest.MAX_BYTES)
    except (FileNotFoundError, ValueError, RecursionError):
        return {}
    return data if isinstance(data, dict) else {}


def _read_journal(path: Path) -> tuple[set[str], set[str]]:
    try:
        data = _read_json(path, _MAX_JOURNAL)
        names = set(data["files"]), set(data["replaced"])
    except (ValueError, KeyError, TypeError, RecursionError) as error:
        raise SaveError(f"{path} is damaged ({error}). Save into another directory.") from error
    foreign = [repr(name) for name in names[0] | names[1] if not _is_plain(name)]
    if foreign:
        raise SaveError(
            f"{path} names files outside of its directory; no save wrote that:\n{listed(foreign)}\n"
            "Save into another directory."
        )
    return names


def _read_json(path: Path, limit: int) -> Any:
    """Raises `ValueError` for what is no JSON, no file, or larger than `limit` bytes."""
    status = os.stat(path)
    if stat.S_ISDIR(status.st_mode):
        raise IsADirectoryError(errno.EISDIR, os.strerror(errno.EISDIR), str(path))
    if not stat.S_ISREG(status.st_mode) or status.st_size > limit:
        raise ValueError("it is no file that a save wrote")
    return json.loads(path.read_bytes())


def _is_plain(name: object) -> bool:
    return isinstance(name, str) and name not in ("", ".", "..") and not set(name) & set("/\\\0")


def _leftovers(directory: Path) -> Iterator[tuple[str, str, Path]]:
    for found in sorted(os.listdir(directory)):
        match = _STAGED.fullmatch(found)
        if match:
            yield match["name"], match["save_id"], directory / found


def _remove(path: Path) -> None:
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path)
    else:
        _unlink(path)


def _raise(error: OSError) -> None:
    raise error


def _unlink(path: Path) -> bool:
    try:
        os.unlink(path)
    except FileNotFoundError:
        return False
    return True


if __name__ == "__main__":
    complete(Path(sys.argv[1]))
