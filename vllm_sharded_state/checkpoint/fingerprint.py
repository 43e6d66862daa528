"""What whole files are: size, checksum of a safetensors header, checksum of the content."""

import os
from collections.abc import Iterable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from .checksum import Hash, checksum
from .entries import SourceFile
from .header import MAX_HEADER, PREFIX

#: Bytes that are read and hashed at a time: they stay in a core's cache in between.
_STEP = 1 << 20
#: Threads at most; each has one file at a time, and the GIL is released while it reads and hashes.
_THREADS = 8


def content(path: Path) -> tuple[int, str]:
    """Size in bytes and XXH3 checksum of a file. Raises `OSError`."""
    digest, size = Hash(), 0
    room = memoryview(bytearray(_STEP))
    with open(path, "rb", buffering=0) as file:
        while count := file.readinto(room):
            digest.update(room[:count])
            size += count
    return size, str(digest.hexdigest())


def outline(path: Path) -> tuple[int, str | None]:
    """Size of a file and checksum of its safetensors header (8+N bytes); None where it has none.

    Two fine-tunes of one model agree in both. Raises `OSError`.
    """
    with open(path, "rb", buffering=0) as file:
        size = os.fstat(file.fileno()).st_size
        first = file.read(PREFIX)
        length = int.from_bytes(first, "little")
        whole = len(first) == PREFIX and length <= min(size - PREFIX, MAX_HEADER)
        if path.suffix != ".safetensors" or not whole:
            return size, None
        rest = b""
        while len(rest) < length and (more := file.read(length - len(rest))):
            rest += more
    return size, checksum(first + rest)


def source_file(path: Path) -> SourceFile:
    """All of it. Raises `OSError`, also when the file changes its size meanwhile."""
    size, header = outline(path)
    read, digest = content(path)
    if read != size:
        raise OSError(f"{path} had {size} bytes, then {read}: somebody writes to it")
    return SourceFile(size, header, digest)


def source_files(folder: Path, names: Iterable[str]) -> dict[str, SourceFile]:
    """Each of `names` below `folder`, several at a time. Raises `OSError`."""
    ordered = sorted(names)
    with ThreadPoolExecutor(min(_THREADS, len(os.sched_getaffinity(0)))) as pool:
        found = pool.map(lambda name: source_file(folder / name), ordered)
        return dict(zip(ordered, found, strict=True))
