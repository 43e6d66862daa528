"""Part reader: the tensors of safetensors files, their bytes checked against what was written."""

from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open

from vllm_sharded_state.errors import IncompleteError

from . import staging
from .checksum import Hash, host_bytes
from .manifest import FileEntry


class PartReader:
    """The tensors of several part files, as views of memory-mapped bytes; each key once.

    Raises `IncompleteError` for a file that is missing, has another size than `files` says, or is no
    safetensors file.
    """

    def __init__(
        self, directory: Path, files: dict[str, FileEntry | None], save_id: str | None = None
    ) -> None:
        self._directory = directory
        self._handles: dict[str, Any] = {}
        for name, entry in files.items():
            size = None if entry is None else entry.size
            path = staging.locate(directory, name, save_id) if save_id else directory / name
            if not path.is_file():
                raise IncompleteError(f"{path} is missing. Copy it there, or save the model again.")
            if size is not None and path.stat().st_size != size:
                raise IncompleteError(
                    f"{path} has {path.stat().st_size} bytes, {size} were written: it was cut off or "
                    "replaced.\nCopy it again, or save the model again."
                )
            try:
                self._handles[name] = safe_open(path, framework="pt")
            except (SafetensorError, OSError) as error:
                raise IncompleteError(f"{path} is no readable safetensors file: {error}") from error

    def keys(self, name: str) -> list[str]:
        """The keys of one file."""
        return list(self._handles[name].keys())

    def get(self, name: str, key: str) -> torch.Tensor:
        """One tensor on the CPU; its pages are read when they are touched."""
        return self._handles[name].get_tensor(key)

    def verified(self, name: str, key: str, checksum: str) -> torch.Tensor:
        """Like `get`, once the bytes were found to be those written. Raises `IncompleteError`."""
        tensor = self.get(name, key)
        digest = Hash()
        for chunk in host_bytes(tensor):
            digest.update(chunk)
        if digest.hexdigest() != checksum:
            raise IncompleteError(
                f"{key} in {self._directory / name} is not what was saved: the file is damaged, or of "
                "another save.\nCopy it again, or save the model again."
            )
        return tensor

    def form(self, name: str, key: str) -> tuple[list[int], str]:
        """Shape and safetensors dtype of one tensor, from the header."""
        piece = self._handles[name].get_slice(key)
        return list(piece.get_shape()), str(piece.get_dtype())
