"""Load sharded state into a model that can take it.

What: `vllm.model_executor.model_loader.sharded_state_loader.ShardedStateLoader.load_model`, which
    the class inherits from `vllm.model_executor.model_loader.base_loader.BaseModelLoader`

Why: the inherited order is build, load, `process_weights_after_loading`. A sharded state was saved
    after that step, so it is loaded into tensors that the step has not yet renamed, reshaped or
    deleted, and then processed a second time.

How: `load.load_model(loader, vllm_config, model_config, prefix, upstream)` decides, with the
    inherited method, bound, as `upstream`.

Since: vLLM 0.32 (seen in 0.32 and 0.33; both files are the same in both).

Until: upstream's `sharded_state` brings the model to its processed structure before it loads.
"""

from types import MethodType, SimpleNamespace
from typing import Any

import torch

from vllm_sharded_state.patches.contract import Function, Patch
from vllm_sharded_state.patches.inward import inward, stand_in
from vllm_sharded_state.patches.probing import quiet


def make(original: Function) -> Function:
    """Return `load_model` for the class itself."""

    def load_model(
        self: Any, vllm_config: Any, model_config: Any, prefix: str = ""
    ) -> torch.nn.Module:
        """Build a model and give it the sharded state at `model_config.model`.

        Raises:
            ShardedStateError: the checkpoint is not this model's, not whole, or not for here.
        """
        upstream = MethodType(original, self)
        load = inward("load", "load_model")
        model: torch.nn.Module = load(self, vllm_config, model_config, prefix, upstream)
        return model

    return load_model


class _LoadedUnprocessedError(Exception):
    pass


def probe() -> bool:
    """Load a toy; are its weights loaded while nothing says that they are processed already?

    The toy's load stops there: what comes after it upstream touches the device.
    """
    from vllm.config.load import LoadConfig
    from vllm.model_executor.model_loader import base_loader
    from vllm.model_executor.model_loader.sharded_state_loader import ShardedStateLoader
    from vllm.model_executor.utils import is_weights_pre_processed

    class ProbeLoader(ShardedStateLoader):
        def create_model(self, *args: Any, **kwargs: Any) -> torch.nn.Module:
            return torch.nn.Module()

        def load_weights(self, *args: Any, **kwargs: Any) -> None:
            if not is_weights_pre_processed():
                raise _LoadedUnprocessedError

    loader = object.__new__(ProbeLoader)
    loader.load_config = LoadConfig(load_format="sharded_state", device="cpu")
    vllm_config = SimpleNamespace(
        load_config=loader.load_config, device_config=SimpleNamespace(device="cpu")
    )
    handed_over: list[Any] = []
    with (
        quiet(base_loader.logger),
        stand_in("load", "load_model", lambda *arguments: handed_over.append(arguments)),
    ):
        try:
            loader.load_model(vllm_config, SimpleNamespace(dtype=torch.float32))
        except _LoadedUnprocessedError:
            return True
    return not handed_over


PATCH = Patch(
    name="sharded_state_load_model",
    module="vllm.model_executor.model_loader.sharded_state_loader",
    symbol="ShardedStateLoader.load_model",
    probe=probe,
    make=make,
    defined_in="vllm.model_executor.model_loader.base_loader:BaseModelLoader.load_model",
)
