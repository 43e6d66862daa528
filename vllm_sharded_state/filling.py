"""Saved tensors into the memory of a model's, many at a time."""

from collections.abc import Callable, Iterable, Sequence
from itertools import islice

import torch

from .checkpoint.dtypes import torch_dtype
from .checkpoint.plan import clusters
from .checkpoint.reading import Reader, Request
from .errors import RestoreError, listed
from .progress import Progress
from .state.kernels import same_bits

#: Bytes of tensors that are fetched ahead.
AHEAD = 64 << 20

#: Where a tensor lies: a file, a key in it, and the checksum of its bytes, if one is known.
Origin = tuple[str, str, str | None]


class Filling:
    """The reads of one load; `origin` tells where the tensor of a path lies."""

    def __init__(
        self, reader: Reader, origin: Callable[[str], Origin], progress: Progress | None = None
    ) -> None:
        self._reader = reader
        self._origin = origin
        self._progress = progress

    def fill(self, places: Iterable[tuple[str, torch.Tensor]]) -> None:
        """Read the tensor of each path into the memory of the one beside it."""
        requests = [Request(*self._origin(path), tensor) for path, tensor in places]
        if self._progress is None:
            self._reader.fill(requests)
            return
        with self._progress.reading() as progress:
            self._reader.fill(requests, progress)

    def fetch(self, paths: Iterable[str], device: torch.device) -> dict[str, torch.Tensor]:
        """The tensors of `paths` in new memory on `device`."""
        made = {path: self._empty(path, device) for path in paths}
        self.fill(made.items())
        return made

    def ahead(self, paths: Sequence[str]) -> Callable[[str], torch.Tensor]:
        """A function that gives the tensor of one of `paths`, in new memory on the CPU.

        Best asked in their order: it reads some ahead, up to `AHEAD` bytes, and keeps no others.
        """
        position = {path: index for index, path in enumerate(paths)}
        kept: dict[str, torch.Tensor] = {}

        def read(path: str) -> torch.Tensor:
            if path not in kept:
                kept.clear()
                size = 0
                for following in islice(paths, position[path], None):
                    tensor = self._empty(following, torch.device("cpu"))
                    size += tensor.nbytes
                    if kept and size > AHEAD:
                        break
                    kept[following] = tensor
                self.fill(kept.items())
            return kept.pop(path)

        return read

    def refuse_overwritten(self, filled: Sequence[tuple[str, torch.Tensor]]) -> None:
        """Raise `RestoreError` for tensors that were saved apart, share memory, and differ there."""
        suspects = [
            filled[position]
            for group in clusters(tensor for _, tensor in filled)
            if len({self._origin(filled[position][0])[:2] for position in group}) > 1
            for position in group
        ]
        read = Filling(self._reader, self._origin).ahead([path for path, _ in suspects])
        lost = [path for path, tensor in suspects if not same_bits(read(path), tensor)]
        if lost:
            raise RestoreError(
                f"Tensors that were saved apart share memory in this model, and differ:\n{listed(lost)}\n"
                "Start the engine as it was when saving."
            )

    def _empty(self, path: str, device: torch.device) -> torch.Tensor:
        file, key, _ = self._origin(path)
        shape, dtype = self._reader.form(file, key)
        return torch.empty(shape, dtype=torch_dtype(dtype), device=device)
