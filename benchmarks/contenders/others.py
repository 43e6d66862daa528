"""Other libraries' readers and writer. Each hands out tensors of its own, which are copied into place.

vLLM's iterator for runai-model-streamer clones every tensor before that. Here it does not: the
library shall be seen at its best.
"""

import os
from pathlib import Path

import torch

from benchmarks.inputs import Input


class Runai:
    """runai-model-streamer, to the CPU, as `runai_safetensors_weights_iterator` calls it."""

    def __init__(self) -> None:
        from runai_model_streamer import SafetensorsStreamer

        self._streamer = SafetensorsStreamer

    def read(self, given: Input, into: dict[str, torch.Tensor]) -> None:
        """Fill every tensor."""
        with self._streamer() as streamer:
            streamer.stream_files([str(path) for path in given.paths], device="cpu")
            for key, tensor in streamer.get_tensors():
                into[key].copy_(tensor)


class FastSafetensors:
    """fastsafetensors without GDS, to the CPU: whole files into its own buffers."""

    def __init__(self) -> None:
        import fastsafetensors

        self._library = fastsafetensors

    def read(self, given: Input, into: dict[str, torch.Tensor]) -> None:
        """Fill every tensor."""
        loader = self._library.SafeTensorsFileLoader(
            self._library.SingleGroup(), device="cpu", nogds=True
        )
        try:
            loader.add_filenames({0: [str(path) for path in given.paths]})
            buffers = loader.copy_files_to_device()
            try:
                for key, tensor in into.items():
                    tensor.copy_(buffers.get_tensor(key))
            finally:
                buffers.close()
        finally:
            loader.close()


class InstantTensor:
    """InstantTensor, which reads to a GPU: from there into the same memory as the others."""

    def read(self, given: Input, into: dict[str, torch.Tensor]) -> None:
        """Fill every tensor."""
        import instanttensor

        files = [str(path) for path in given.paths]
        with instanttensor.safe_open(files, framework="pt", device=0, copy=True) as reader:
            for key, tensor in reader.tensors():
                into[key].copy_(tensor)


class SaveFile:
    """`safetensors.torch.save_file`, all tensors in one file; it flushes nothing by itself."""

    def write(self, directory: Path, tensors: dict[str, torch.Tensor], sync: bool) -> None:
        """Write every tensor."""
        from safetensors.torch import save_file

        save_file(tensors, directory / "model.safetensors")
        if sync:
            flush(directory)


def flush(directory: Path) -> None:
    """fsync every file of `directory`."""
    for path in directory.iterdir():
        file = os.open(path, os.O_RDONLY)
        try:
            os.fsync(file)
        finally:
            os.close(file)
