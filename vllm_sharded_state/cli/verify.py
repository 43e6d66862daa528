"""`vllm-sharded-state verify`: every byte against its checksum, or one save against another."""

import argparse
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from tqdm.auto import tqdm

from vllm_sharded_state.checkpoint.checksum import checksum
from vllm_sharded_state.checkpoint.dtypes import torch_dtype
from vllm_sharded_state.checkpoint.manifest import Manifest, RankEntry, TensorEntry
from vllm_sharded_state.checkpoint.reading import PartReader, Request, unmatched
from vllm_sharded_state.errors import ManifestError, ShardedStateError

from .opened import open_rank, read_manifest

#: Bytes of tensors that are in memory at a time, unless one alone has more.
_BATCH = 256 << 20


def run(given: argparse.Namespace) -> tuple[dict[str, Any], int]:
    """What was found, and the exit code: 1 where anything is damaged or different.

    Raises `ShardedStateError` where the manifest itself is refused, or two saves can't be compared.
    """
    began = time.perf_counter()
    found = read_manifest(given.directory)
    result: dict[str, Any] = {"directory": str(given.directory)}
    problems = _problems(given.directory, found)
    result |= {
        "tensors": sum(len(rank.tensors) for rank in found.ranks),
        "bytes": _size(found),
        "problems": problems,
        "notes": _side_files(given.directory, found),
    }
    if given.against is not None and not problems:
        other = read_manifest(given.against)
        problems += [f"{given.against}: {text}" for text in _problems(given.against, other)]
    if given.against is not None and not problems:
        result["against"] = str(given.against)
        result["different"] = _against(given.directory, found, given.against, other)
    result["seconds"] = time.perf_counter() - began
    return result, 1 if problems or result.get("different") else 0


def show(result: dict[str, Any]) -> None:
    """Print what was found."""
    for problem in result["problems"]:
        print(problem)
    if result["problems"]:
        print("Copy what is damaged again, or save the model again.")
        return
    for note in result["notes"]:
        print(note)
    size, seconds = result["bytes"] / 2**30, result["seconds"]
    print(
        f"{result['tensors']} tensors, {size:.2f} GiB, every byte as it was saved ({seconds:.1f} s)"
    )
    if "against" not in result:
        return
    for line in result["different"]:
        print(line["name"], line["how"], sep=": ")
    count = len(result["different"])
    print(
        f"{count} tensors and values differ from {result['against']}" if count else "no difference"
    )


def _problems(directory: Path, found: Manifest) -> list[str]:
    """What is wrong with the parts of a save, one text each."""
    problems = []
    with _bar(_size(found)) as bar:
        for rank in found.ranks:
            problems += _check(directory, found, rank, bar)
    return problems


def _side_files(directory: Path, found: Manifest) -> list[str]:
    """Which files beside the weights are not as they were saved: users may edit them."""
    notes = []
    for name, saved in sorted(found.side_files.items()):
        path = directory / name
        if not path.is_file():
            notes.append(f"{name} is not there any more (no weights)")
        elif path.stat().st_size != saved.size or checksum(path.read_bytes()) != saved.checksum:
            notes.append(f"{name} was changed after the save (no weights)")
    return notes


def _size(found: Manifest) -> int:
    return sum(entry.nbytes for rank in found.ranks for entry in rank.tensors.values())


def _bar(total: int) -> Any:
    """A progress bar in bytes, on a terminal only."""
    return tqdm(
        total=total, unit="B", unit_scale=True, unit_divisor=1024, disable=None, file=sys.stderr
    )


def _check(directory: Path, found: Manifest, rank: RankEntry, bar: Any) -> list[str]:
    """What is wrong with the files of one rank, one text each."""
    try:
        reader = open_rank(directory, found, rank)
    except ShardedStateError as error:
        return [_cause(error)]
    problems = []
    try:
        missing, unexpected = unmatched(reader, rank)
        problems += [f"{key} is missing" for key in sorted(missing)]
        problems += [f"{key} is not in the manifest" for key in sorted(unexpected)]
        if problems:
            return problems
        for batch in _batches(rank.tensors):
            requests = [_request(entry) for entry in batch.values()]
            try:
                reader.fill(requests, bar.update)
            except ShardedStateError as error:
                problems.append(_cause(error))
    finally:
        reader.close()
    return problems


def _cause(error: ShardedStateError) -> str:
    """The message without its last line, which says what to do."""
    return str(error).rpartition("\n")[0] or str(error)


def _request(entry: TensorEntry) -> Request:
    tensor = torch.empty(entry.shape, dtype=torch_dtype(entry.dtype))
    return Request(entry.file, entry.key, entry.checksum, tensor)


def _batches(tensors: dict[str, TensorEntry]) -> Iterator[dict[str, TensorEntry]]:
    """The tensors in the order of their files, up to `_BATCH` bytes together."""
    batch: dict[str, TensorEntry] = {}
    size = 0
    for name, entry in tensors.items():
        if batch and size + entry.nbytes > _BATCH:
            yield batch
            batch, size = {}, 0
        batch[name] = entry
        size += entry.nbytes
    if batch:
        yield batch


def _against(
    directory: Path, found: Manifest, against: Path, other: Manifest
) -> list[dict[str, str]]:
    """Tensors and values in which two saves differ, by rank and name."""
    ranks = {rank.rank: rank for rank in other.ranks}
    if ranks.keys() != {rank.rank for rank in found.ranks}:
        raise ManifestError(
            f"{directory} holds {len(found.ranks)} ranks and {against} {len(ranks)}: each holds other "
            "slices of the weights.\nCompare saves with the same parallel sizes."
        )
    different = []
    for rank in found.ranks:
        here, there = (directory, found, rank), (against, other, ranks[rank.rank])
        for name, how in _differences(here, there):
            where = f"rank {rank.rank} {name}" if len(ranks) > 1 else name
            different.append({"name": where, "how": how})
    return different


_Save = tuple[Path, Manifest, RankEntry]


def _differences(here: _Save, there: _Save) -> Iterator[tuple[str, str]]:
    left, right = _paths(here[2]), _paths(there[2])
    readers = [open_rank(*here), open_rank(*there)]
    try:
        for name in sorted(left.keys() | right.keys()):
            a, b = left.get(name), right.get(name)
            if a is None or b is None:
                yield name, f"only in {there[0] if a is None else here[0]}"
            elif (a.dtype, a.shape) != (b.dtype, b.shape):
                yield name, f"{a.dtype} {a.shape} and {b.dtype} {b.shape}"
            elif a.checksum != b.checksum:
                yield name, _largest(readers, a, b)
    finally:
        for reader in readers:
            reader.close()
    values = [
        {name: entry.value for name, entry in save[2].values.items()} for save in (here, there)
    ]
    for name in sorted(values[0].keys() | values[1].keys()):
        a_value, b_value = (side.get(name, "nothing") for side in values)
        if a_value != b_value:
            yield name, f"{a_value} and {b_value}"


def _paths(rank: RankEntry) -> dict[str, TensorEntry]:
    return {path: e for name, e in rank.tensors.items() for path in (name, *e.aliases)}


def _largest(readers: list[PartReader], a: TensorEntry, b: TensorEntry) -> str:
    """By how much two tensors of one form differ."""
    left, right = (
        reader.verified(entry.file, entry.key, entry.checksum)
        for reader, entry in zip(readers, (a, b), strict=True)
    )
    if left.dtype == torch.bool or left.is_complex():
        return "other bytes"
    wide = torch.float64 if left.is_floating_point() else torch.int64
    apart = (left.to(wide) - right.to(wide)).abs()
    changed = int(apart.count_nonzero())
    return f"{changed} of {left.numel()} elements, the largest difference {apart.max().item():.6g}"
