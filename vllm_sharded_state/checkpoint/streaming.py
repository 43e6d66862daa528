"""Part reader for object storage: tensors through `runai-model-streamer`, checked as local ones are.

The streamer reads ranges of files (`s3://`, `gs://`, `az://`, or paths) into buffers of its own, many at
a time, and gives them out as they come in. Each tensor's bytes are compared with its checksum there and
then copied into the tensor: once, whatever the order. Only ranges that were asked for are fetched.
"""

import json
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

import torch

from vllm_sharded_state.errors import IncompleteError, TensorMismatchError, listed

from . import header, staging, store
from .checksum import checksum as checksum_of
from .dtypes import torch_dtype
from .header import Place
from .manifest import FileEntry
from .memory import raw
from .reading import Reader, Request

#: Stands for the size of a file that nothing tells.
_UNKNOWN = 2**63 - 1

_AGAIN = "Copy it again, or save the model again."


class StreamReader(Reader):
    """The tensors of several part files below `base`, a directory or a prefix in object storage.

    The interface and the arguments are those of `PartReader`. Each call reads anew.

    Raises `FetchError` for what can't be fetched, `IncompleteError` for what is not what was saved.
    """

    def __init__(
        self,
        base: str,
        files: Mapping[str, FileEntry | None],
        save_id: str | None = None,
        verify: str = "full",
    ) -> None:
        super().__init__(verify)
        self._base = base.rstrip("/")
        self._paths = {name: self._locate(name, save_id) for name in files}
        told = {name: None if verify == "off" else entry for name, entry in files.items()}
        self._ours: set[str] = set()
        self._places = self._read_headers(told)

    def close(self) -> None:
        """Nothing stays open between two calls."""

    def keys(self, name: str) -> list[str]:
        """The keys of one file."""
        return list(self._places[name])

    def is_ours(self, name: str) -> bool:
        """Whether this package wrote the file, rather than stock vLLM."""
        return name in self._ours

    def fill(
        self, requests: Iterable[Request], progress: Callable[[int], None] | None = None
    ) -> None:
        """Read each request into its tensor, in the order in which the bytes come in.

        Tensors may lie on any device, be strided, and share memory where they are equal. `progress` is
        called with the number of bytes read since the last call.

        Raises `TensorMismatchError` for a tensor of another shape or dtype than the file has, before
        anything is read; `IncompleteError` naming every tensor whose checksum differs. Tensors may be
        partly filled then.
        """
        wanted: dict[store.Range, list[Request]] = {}
        for request in requests:
            place = self._place(request.file, request.key)
            self._match(request, place)
            wanted.setdefault((request.file, place.start, place.end), []).append(request)
        damaged: set[tuple[str, str]] = set()
        for span, data in self._read(list(wanted)):
            digest = None
            for request in wanted[span]:
                if request.checksum is not None and self._verify == "full":
                    digest = digest or _digest(data)
                    if digest != request.checksum:
                        damaged.add((request.file, request.key))
                _copy(data, request.tensor)
            if progress is not None:
                progress(data.numel())
        if damaged:
            self._refuse_damaged(damaged)

    def _match(self, request: Request, place: Place) -> None:
        tensor = request.tensor
        if list(tensor.shape) != place.shape or tensor.dtype != torch_dtype(place.dtype):
            raise TensorMismatchError(
                f"{request.key} in {self._paths[request.file]} is {place.shape} {place.dtype}; the "
                f"tensor to fill is {list(tensor.shape)} {tensor.dtype}."
            )

    def _place(self, name: str, key: str) -> Place:
        try:
            return self._places[name][key]
        except KeyError as error:
            raise IncompleteError(f"{self._base}/{name} holds no tensor {key!r}.") from error

    def _locate(self, name: str, save_id: str | None) -> str:
        if save_id is not None and not store.is_remote(self._base):
            return str(staging.locate(Path(self._base), name, save_id))
        return f"{self._base}/{name}"

    def _read_headers(self, files: Mapping[str, FileEntry | None]) -> dict[str, dict[str, Place]]:
        sizes = {name: self._size(name, entry) for name, entry in files.items()}
        spans = [(name, 0, header.PREFIX) for name in files]
        prefixes = {name: bytes(data.numpy()) for (name, _, _), data in self._read(spans)}
        spans = []
        for name in files:
            with _naming(self._paths[name]):
                count = header.length(prefixes[name], sizes[name])
            spans.append((name, header.PREFIX, header.PREFIX + count))
        texts = {name: bytes(data.numpy()) for (name, _, _), data in self._read(spans)}
        places: dict[str, dict[str, Place]] = {}
        ends: dict[str, int] = {}
        for name, entry in files.items():
            if entry is not None and checksum_of(prefixes[name] + texts[name]) != entry.header:
                raise IncompleteError(
                    f"The header of {self._paths[name]} is not what was saved: the file is damaged, or "
                    f"of another save.\n{_AGAIN}"
                )
            with _naming(self._paths[name]):
                size = _told_size(texts[name]) if sizes[name] == _UNKNOWN else sizes[name]
                places[name] = header.parse(texts[name], size)
            if header.is_ours(texts[name]):
                self._ours.add(name)
            ends[name] = size
        if store.is_remote(self._base):
            # A streamer before 0.17 takes an answer that is short for whole, and this comes before
            # the model is built.
            for _ in self._read([(name, end - 1, end) for name, end in ends.items()]):
                pass
        return places

    def _size(self, name: str, entry: FileEntry | None) -> int:
        """The size of a file: on disk what it is; else what the manifest says, if anything does.

        Bytes beyond that in object storage go unnoticed: they are never read.
        """
        if store.is_remote(self._base):
            return _UNKNOWN if entry is None else entry.size
        path = Path(self._paths[name])
        if not path.is_file():
            raise IncompleteError(f"{path} is missing. Copy it there, or save the model again.")
        size = path.stat().st_size
        if entry is not None and size != entry.size:
            raise IncompleteError(
                f"{path} has {size} bytes, {entry.size} were written: it was cut off or replaced.\n"
                f"{_AGAIN}"
            )
        return size

    def _read(self, spans: list[store.Range]) -> Iterator[tuple[store.Range, torch.Tensor]]:
        """Bytes of ranges of files that are given by name, as they come in; valid until the next."""
        names = {self._paths[name]: name for name, _, _ in spans}
        full = sorted((self._paths[name], start, end) for name, start, end in spans)
        for (path, start, end), data in store.read(full):
            yield (names[path], start, end), data

    def _refuse_damaged(self, damaged: set[tuple[str, str]]) -> None:
        what = "tensor is" if len(damaged) == 1 else "tensors are"
        raise IncompleteError(
            f"{len(damaged)} {what} not what was saved in {self._base}: files are damaged, or of another "
            f"save.\n{listed(f'{key} in {name}' for name, key in damaged)}\n"
            "Copy the files again, or save the model again."
        )


@contextmanager
def _naming(path: str) -> Iterator[None]:
    """Turn a `HeaderError` into an `IncompleteError` that names the file."""
    try:
        yield
    except header.HeaderError as error:
        raise IncompleteError(
            f"{path} is no readable safetensors file: {error}.\n{_AGAIN}"
        ) from error


def _told_size(text: bytes) -> int:
    """The size that a header gives its file; what contradicts it is found when it is parsed."""
    try:
        entries = json.loads(text)
        ends = [e["data_offsets"][1] for k, e in entries.items() if k != "__metadata__"]
        return int(header.PREFIX + len(text) + max(ends, default=0))
    except (ValueError, TypeError, LookupError, AttributeError, RecursionError):
        return _UNKNOWN


def _digest(data: torch.Tensor) -> str:
    return checksum_of(memoryview(data.numpy()))


def _copy(data: torch.Tensor, tensor: torch.Tensor) -> None:
    """Put bytes into a tensor of any device and stride."""
    tensor = tensor.detach()
    if tensor.numel() == 0:
        return
    if tensor.device.type == "cpu" and tensor.is_contiguous():
        raw(tensor).copy_(data)
        return
    if data.data_ptr() % tensor.element_size():
        data = data.clone()  # a view needs aligned elements
    tensor.copy_(data.view(tensor.dtype).view(tensor.shape))
