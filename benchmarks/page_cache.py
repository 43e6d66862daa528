"""The kernel's page cache: put files into it, take them out, and see whether that worked."""

import ctypes
import mmap
import os
from collections.abc import Iterable
from pathlib import Path

import numpy

_LIBC = ctypes.CDLL(None, use_errno=True)
PAGE = mmap.PAGESIZE

#: The share of a file's pages that may be in the page cache when it is called cold, and may be
#: missing when it is called warm.
TOLERANCE = 0.01


def resident(path: Path) -> float:
    """The share of the file's pages that are in the page cache, by mincore(2); 1.0 for an empty file."""
    size = path.stat().st_size
    if size == 0:
        return 1.0
    pages = -(-size // PAGE)
    with open(path, "rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as view:
        array = numpy.frombuffer(view, dtype=numpy.uint8)
        states = numpy.zeros(pages, dtype=numpy.uint8)
        failed = _LIBC.mincore(
            ctypes.c_void_p(array.ctypes.data),
            ctypes.c_size_t(size),
            ctypes.c_void_p(states.ctypes.data),
        )
        number = ctypes.get_errno()
        del array  # mmap can't be closed while something looks at it
    if failed:
        raise OSError(number, os.strerror(number), str(path))
    return float((states & 1).mean())


def make_cold(paths: Iterable[Path]) -> None:
    """Flush the files and drop them from the page cache. RuntimeError where the kernel keeps them."""
    for path in paths:
        with open(path, "rb") as file:
            os.fsync(file.fileno())
            os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
        share = resident(path)
        if share > TOLERANCE:
            raise RuntimeError(f"{path} is not cold: {share:.0%} of it stays in the page cache")


def make_warm(paths: Iterable[Path]) -> None:
    """Read the files into the page cache. RuntimeError where the kernel does not keep them."""
    for path in paths:
        if resident(path) < 1.0:
            with open(path, "rb", buffering=0) as file:
                buffer = bytearray(8 << 20)
                while file.readinto(buffer):
                    pass
        share = resident(path)
        if share < 1.0 - TOLERANCE:
            raise RuntimeError(f"{path} is not warm: only {share:.0%} of it is in the page cache")
