"""This package's reader and writer: the only file here that knows their interfaces."""

import os
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path

import torch

from benchmarks.inputs import Input
from vllm_sharded_state.checkpoint import manifest, reading, writing


class Reader:
    """`PartReader` on the files of an input, which are what it is told to expect."""

    def __init__(self, verify: str) -> None:
        self._verify = verify

    def read(self, given: Input, into: dict[str, torch.Tensor]) -> None:
        """Open the files and fill every tensor."""
        files = {name: manifest.FileEntry(*form) for name, form in given.files.items()}
        reader = reading.PartReader(given.directory, files, verify=self._verify)
        reader.fill(
            reading.Request(form.file, key, form.checksum, into[key])
            for key, form in given.tensors.items()
        )
        reader.close()


class Writer:
    """`PartWriter`, up to the parts having their names."""

    def write(self, directory: Path, tensors: dict[str, torch.Tensor], sync: bool) -> None:
        """Write `tensors`; without `sync`, fsync does nothing in the meantime."""
        write(directory, tensors, tensors.__getitem__, sync)


def write(
    directory: Path, keys: Iterable[str], tensor: Callable[[str], torch.Tensor], sync: bool
) -> dict[str, tuple[str, str]]:
    """Write one tensor after another; returns the file and the checksum of each."""
    keys = list(keys)
    with _fsync(sync):
        writer = writing.PartWriter(
            directory,
            lambda part: f"model-rank-0-part-{part}.safetensors",
            None,
            writing.header_room(keys),
        )
        written = {key: writer.add(key, tensor(key)) for key in keys}
        writer.close()
        writer.commit()
    return written


@contextmanager
def _fsync(active: bool) -> Iterator[None]:
    # A stand-in, only for the figures without fsync: the writer itself always does it.
    originals = os.fsync, os.fdatasync
    if not active:
        os.fsync = os.fdatasync = lambda fd: None
    try:
        yield
    finally:
        os.fsync, os.fdatasync = originals
