"""Part reader: the tensors of safetensors files, read into memory that exists, and checked."""

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path

import msgspec
import torch

from vllm_sharded_state.errors import IncompleteError, TensorMismatchError, listed

from . import collector, pool
from .checksum import checksum
from .dtypes import torch_dtype
from .files import PartFile
from .header import Place
from .jobs import PIECE, Damage, Item
from .manifest import STOCK_STOP, FileEntry, RankEntry
from .plan import Rings, plan
from .staging import locate

#: What can be compared while reading: checksums of all bytes, sizes and headers, or neither.
VERIFY = ("full", "size", "off")


class Request(msgspec.Struct, gc=False):
    """One tensor to read: `key` of `file` into the memory of `tensor`.

    `checksum` is what its bytes must have (`checkpoint.checksum`), or None to take any.
    """

    file: str
    key: str
    checksum: str | None
    tensor: torch.Tensor


class Reader(ABC):
    """The tensors of several files by name and key. `verify` is one of `VERIFY`."""

    def __init__(self, verify: str) -> None:
        if verify not in VERIFY:
            raise ValueError(f"verify is {verify!r}, not one of {VERIFY}")
        self._verify = verify

    @abstractmethod
    def close(self) -> None:
        """Close what is open."""

    @abstractmethod
    def keys(self, name: str) -> list[str]:
        """The keys of one file."""

    @abstractmethod
    def is_ours(self, name: str) -> bool:
        """Whether this package wrote the file, rather than stock vLLM."""

    @abstractmethod
    def fill(
        self, requests: Iterable[Request], progress: Callable[[int], None] | None = None
    ) -> None:
        """Read each request into its tensor."""

    @abstractmethod
    def _place(self, name: str, key: str) -> Place:
        """Form and place of one tensor. Raises `IncompleteError` where there is none."""

    def form(self, name: str, key: str) -> tuple[list[int], str]:
        """Shape and safetensors dtype of one tensor, from the header."""
        place = self._place(name, key)
        return list(place.shape), place.dtype

    def get(self, name: str, key: str) -> torch.Tensor:
        """One tensor in memory of its own on the CPU. Raises as `fill` does.

        In object storage each call waits for an answer: ask for many at once with `fill`.
        """
        return self._one(name, key, None)

    def verified(self, name: str, key: str, checksum: str) -> torch.Tensor:
        """Like `get`, once the bytes were found to be those written."""
        return self._one(name, key, checksum)

    def _one(self, name: str, key: str, expected: str | None) -> torch.Tensor:
        place = self._place(name, key)
        tensor = torch.empty(place.shape, dtype=torch_dtype(place.dtype), device="cpu")
        self.fill([Request(name, key, expected, tensor)])
        return tensor


def unmatched(reader: Reader, entry: RankEntry) -> tuple[list[str], list[str]]:
    """What the files of a rank lack of its entry, and what they hold beyond it: `KEY (in FILE)`."""
    listed_keys: dict[str, set[str]] = {name: set() for name in entry.files}
    for tensor in entry.tensors.values():
        listed_keys[tensor.file].add(tensor.key)
    missing: list[str] = []
    unexpected: list[str] = []
    for file, keys in listed_keys.items():
        found = set(reader.keys(file)) - {STOCK_STOP}
        missing += [f"{key} (in {file})" for key in keys - found]
        unexpected += [f"{key} (in {file})" for key in found - keys]
    return missing, unexpected


class PartReader(Reader):
    """The tensors of several part files, which stay open until the reader is closed or gone.

    `files` maps plain file names in `directory` to their entries in the manifest, or to None for files
    that have none. `save_id` is the manifest's: a part whose save was killed between its commit and
    the renaming is read where it was staged. `verify` is `full` (checksums of tensors, headers, and
    sizes), `size` (headers and sizes) or `off`.

    Raises `IncompleteError` for a file that is missing, of another size or header than was written, or
    no safetensors file.
    """

    def __init__(
        self,
        directory: Path,
        files: Mapping[str, FileEntry | None],
        save_id: str | None = None,
        verify: str = "full",
    ) -> None:
        super().__init__(verify)
        self._directory = directory
        with collector.paused():
            self._files = {
                name: _open(directory, name, save_id, None if verify == "off" else entry)
                for name, entry in files.items()
            }

    def close(self) -> None:
        """Close the files."""
        for file in self._files.values():
            file.close()

    def keys(self, name: str) -> list[str]:
        """The keys of one file."""
        return list(self._files[name].places)

    def is_ours(self, name: str) -> bool:
        """Whether this package wrote the file, rather than stock vLLM."""
        return self._files[name].is_ours

    @collector.paused()
    def fill(
        self, requests: Iterable[Request], progress: Callable[[int], None] | None = None
    ) -> None:
        """Read each request into its tensor, in several threads.

        Tensors may lie on any device, be strided, and share memory: then the later request wins.
        `progress` is called in this thread with the number of bytes read since the last call.

        Raises `TensorMismatchError` for a tensor of another shape or dtype than the file has, before
        anything is read; `IncompleteError` naming every tensor whose checksum differs, and for a file
        that can't be read to the end. Tensors may be partly filled then.
        """
        damage, items = Damage(), []
        for item in map(self._item, requests):
            if item.size:
                items.append(item)
            elif item.checksum is not None and item.checksum != checksum(b""):
                damage.items.append(item)
        rings = Rings()
        count = 0 if sum(item.size for item in items) <= PIECE else pool.threads()
        jobs = plan(items, rings, damage, count)
        try:
            pool.Pool(jobs).run(count, progress or _silent)
        finally:
            rings.finish()
        self._refuse(damage.items)
        unverified = {item.file.path for item in items if item.checksum is None}
        for file in self._files.values():
            file.refuse_changed(file.path in unverified)

    def _item(self, request: Request) -> Item:
        place = self._place(request.file, request.key)
        tensor = request.tensor.data
        if tensor.dtype != torch_dtype(place.dtype) or list(tensor.shape) != place.shape:
            raise TensorMismatchError(
                f"{request.key} in {self._directory / request.file} is {place.shape} {place.dtype}; "
                f"the tensor to fill is {list(tensor.shape)} {tensor.dtype}."
            )
        if tensor.is_meta:
            raise TensorMismatchError(f"{request.key} can't be filled: it is on the meta device.")
        expected = request.checksum if self._verify == "full" else None
        return Item(self._files[request.file], request.key, place, expected, tensor)

    def _place(self, name: str, key: str) -> Place:
        try:
            return self._files[name].places[key]
        except KeyError as error:
            raise IncompleteError(f"{self._directory / name} holds no tensor {key!r}.") from error

    def _refuse(self, damaged: list[Item]) -> None:
        if damaged:
            names = {f"{item.key} in {item.file.path.name}" for item in damaged}
            what = "tensor is" if len(names) == 1 else "tensors are"
            raise IncompleteError(
                f"{len(names)} {what} not what was saved in {self._directory}: files are damaged, or of "
                f"another save.\n{listed(names)}\nCopy the directory again, or save the model again."
            )


def _open(directory: Path, name: str, save_id: str | None, entry: FileEntry | None) -> PartFile:
    size, header = (None, None) if entry is None else (entry.size, entry.header)
    if save_id is not None:
        staged = locate(directory, name, save_id)
        if staged != directory / name:
            try:
                return PartFile(staged, size, header)
            except IncompleteError:
                # Somebody may have given it its name just now.
                if staged.exists():
                    raise
    return PartFile(directory / name, size, header)


def _silent(count: int) -> None:
    """Tell nobody."""
