"""What the machine can do: the same bytes into the same memory, and nothing else.

Knows from the input where every tensor lies, so nothing is parsed; no checksum, no conversion.
"""

import os
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import torch

from benchmarks.inputs import Input

#: Bytes in one call. On two cores 1 MiB is a fifth slower, 256 KiB three times; 64 MiB no faster.
PIECE = 16 << 20
#: The most memory areas that one call takes (IOV_MAX).
AREAS = 1024


def _bytes(tensor: torch.Tensor) -> memoryview:
    return memoryview(tensor.reshape(-1).view(torch.uint8).numpy())


class Preadv:
    """preadv(2) from as many threads as there are cores, each piece as large as it may be."""

    def read(self, given: Input, into: dict[str, torch.Tensor]) -> None:
        """Fill every tensor."""
        threads = len(os.sched_getaffinity(0))
        files = {name: os.open(given.directory / name, os.O_RDONLY) for name in given.files}
        try:
            with ThreadPoolExecutor(threads) as pool:
                for done in [
                    pool.submit(_read, files[file], offset, areas)
                    for file, offset, areas in _calls(given, into)
                ]:
                    done.result()
        finally:
            for file in files.values():
                os.close(file)


def _calls(given: Input, into: dict[str, torch.Tensor]) -> list[tuple[str, int, list[memoryview]]]:
    """File, offset and memory of each call: neighbours in a file together, large tensors in pieces."""
    calls: list[tuple[str, int, list[memoryview]]] = []
    file, end, room = "", -1, 0
    for key, stored in sorted(
        given.tensors.items(), key=lambda item: (item[1].file, item[1].offset)
    ):
        data = _bytes(into[key])
        for start in range(0, stored.size, PIECE):
            area = data[start : start + PIECE]
            offset = stored.offset + start
            if (
                (stored.file, offset) != (file, end)
                or room < len(area)
                or len(calls[-1][2]) == AREAS
            ):
                calls.append((stored.file, offset, []))
                room = PIECE
            calls[-1][2].append(area)
            room -= len(area)
            file, end = stored.file, offset + len(area)
    return calls


def _read(file: int, offset: int, areas: list[memoryview]) -> None:
    wanted = sum(map(len, areas))
    while wanted:
        count = os.preadv(file, areas, offset)
        if not count:
            raise RuntimeError("the file ends early")
        wanted, offset = wanted - count, offset + count
        areas = _rest(areas, count)


def _rest(areas: list[memoryview], count: int) -> list[memoryview]:
    for index, area in enumerate(areas):
        if count < len(area):
            return [area[count:], *areas[index + 1 :]]
        count -= len(area)
    return []


def _groups(areas: list[memoryview]) -> Iterator[list[memoryview]]:
    group: list[memoryview] = []
    room = PIECE
    for area in areas:
        if group and (len(group) == AREAS or room < len(area)):
            yield group
            group, room = [], PIECE
        group.append(area)
        room -= len(area)
    if group:
        yield group


class Plain:
    """writev(2), one call after another, into one file: the bytes of the tensors and nothing else."""

    def write(self, directory: Path, tensors: dict[str, torch.Tensor], sync: bool) -> None:
        """Write every tensor."""
        areas = [
            data[start : start + PIECE]
            for data in map(_bytes, tensors.values())
            for start in range(0, len(data), PIECE)
        ]
        file = os.open(directory / "plain", os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
        try:
            for group in _groups(areas):
                while group:
                    group = _rest(group, os.writev(file, group))
            if sync:
                os.fsync(file)
        finally:
            os.close(file)
