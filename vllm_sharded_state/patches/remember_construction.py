"""Remember from which configuration each model was built, and with which small values.

What: `vllm.model_executor.model_loader.utils.record_metadata_for_reloading` (imported there by
    value from `vllm.model_executor.model_loader.reload.layerwise`)

Why: `ShardedStateLoader.save_model` is called with the model alone. To read a weight again that the
    backend has packed away, the saving process has to build the model's twin from the configuration
    the model was built from, which upstream does not keep with the model; and a value that a weight
    loader or the processing step changed can only be told from one that was so from the start.

How: upstream calls this function right after the model class has run, with the configuration still
    current. After it, `state.construction.remember(model, vllm_config)` is called.

Since: vLLM 0.32 (seen in 0.32 and 0.33).

Until: upstream records the configuration beside the metadata, or passes it to `save_model`.
"""

import torch

from vllm_sharded_state.patches.contract import Function, Patch
from vllm_sharded_state.patches.inward import inward, stand_in
from vllm_sharded_state.patches.probing import replaced


def make(original: Function) -> Function:
    """Return the function with the call to `remember` after it."""

    def record_metadata_for_reloading(model: torch.nn.Module) -> None:
        from vllm.config import get_current_vllm_config

        original(model)
        inward("state.construction", "remember")(model, get_current_vllm_config())

    return record_metadata_for_reloading


def probe() -> bool:
    """Record a toy; is the configuration that was current left behind?"""
    import vllm.config
    from vllm.model_executor.model_loader import utils

    current = object()
    seen: list[tuple[object, object]] = []
    model = torch.nn.Module()
    with (
        replaced(vllm.config, get_current_vllm_config=lambda: current),
        stand_in("state.construction", "remember", lambda *pair: seen.append(pair)),
    ):
        utils.record_metadata_for_reloading(model)
    return seen != [(model, current)]


PATCH = Patch(
    name="remember_construction",
    module="vllm.model_executor.model_loader.utils",
    symbol="record_metadata_for_reloading",
    probe=probe,
    make=make,
    defined_in="vllm.model_executor.model_loader.reload.layerwise:record_metadata_for_reloading",
)
