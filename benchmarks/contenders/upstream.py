"""vLLM's own loops, called as they are: the plugin is not registered in these processes."""

import tempfile
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch

from benchmarks.inputs import Input


class _Model:
    """As much of a model as the sharded state loader asks for: its tensors by key."""

    def __init__(self, tensors: dict[str, torch.Tensor]) -> None:
        self._tensors = tensors

    def state_dict(self) -> dict[str, torch.Tensor]:
        return dict(self._tensors)


def _stock_loader() -> Any:
    """The class `ShardedStateLoader`, stock, in a process with a world of one rank."""
    from vllm.config import VllmConfig, set_current_vllm_config
    from vllm.distributed import init_distributed_environment, initialize_model_parallel
    from vllm.model_executor.model_loader.sharded_state_loader import ShardedStateLoader

    if ShardedStateLoader.load_weights.__module__ != ShardedStateLoader.__module__:
        raise RuntimeError(
            "ShardedStateLoader is patched in this process: VLLM_PLUGINS has to be ''"
        )
    with set_current_vllm_config(VllmConfig()):
        meeting = Path(tempfile.mkdtemp()) / "world"
        init_distributed_environment(1, 0, f"file://{meeting}", 0, "gloo")
        initialize_model_parallel(1, 1)
    return ShardedStateLoader


class Sharded:
    """`ShardedStateLoader.load_weights`: safe_open, get_tensor, copy_, one tensor after another."""

    def __init__(self) -> None:
        from vllm.config.load import LoadConfig

        self._loader = _stock_loader()(LoadConfig(load_format="sharded_state"))

    def read(self, given: Input, into: dict[str, torch.Tensor]) -> None:
        """Fill every tensor."""
        config = SimpleNamespace(model=str(given.directory), model_weights=None)
        self._loader.load_weights(_Model(into), config)


class ShardedSave:
    """`ShardedStateLoader.save_model`."""

    def __init__(self) -> None:
        self._loader = _stock_loader()

    def write(self, directory: Path, tensors: dict[str, torch.Tensor], sync: bool) -> None:
        """Write every tensor."""
        from .others import flush

        self._loader.save_model(_Model(tensors), str(directory))
        if sync:
            flush(directory)


class Default:
    """`safetensors_weights_iterator`, with its weights copied as `default_weight_loader` does."""

    def __init__(self) -> None:
        from vllm.model_executor.model_loader import weight_utils

        self._utils = weight_utils

    def read(self, given: Input, into: dict[str, torch.Tensor]) -> None:
        """Fill every tensor."""
        files = [str(path) for path in given.paths]
        for key, tensor in self._utils.safetensors_weights_iterator(files, False):
            self._utils.default_weight_loader(into[key], tensor)
