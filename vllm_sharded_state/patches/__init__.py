"""The changes this package makes to vLLM: one file for one upstream symbol, all listed here."""

from vllm_sharded_state import envs
from vllm_sharded_state.patches import (
    compressed_tensors_kv_pre_processed,
    engine_collective_rpc,
    executor_sleep,
    finalize_layerwise_reload,
    initialize_layerwise_reload,
    kv_cache_pre_processed,
    kv_cache_scale_dtype,
    layerwise_any_loader,
    reload_weights,
    remember_construction,
    sharded_state_init,
    sharded_state_load_model,
    sharded_state_load_weights,
    sharded_state_save_model,
    untie_word_embeddings,
    worker_finish_weight_update,
    worker_reload_weights,
    worker_start_weight_update,
    worker_update_weights,
    worker_weight_checksums,
)
from vllm_sharded_state.patches.contract import Patch, Status

__all__ = ["PATCHES", "Patch", "Status", "apply_all"]

PATCHES: tuple[Patch, ...] = (
    kv_cache_scale_dtype.PATCH,
    kv_cache_pre_processed.PATCH,
    compressed_tensors_kv_pre_processed.PATCH,
    layerwise_any_loader.PATCH,
    remember_construction.PATCH,
    reload_weights.PATCH,
    engine_collective_rpc.PATCH,
    executor_sleep.PATCH,
    initialize_layerwise_reload.PATCH,
    finalize_layerwise_reload.PATCH,
    worker_start_weight_update.PATCH,
    worker_update_weights.PATCH,
    worker_finish_weight_update.PATCH,
    sharded_state_init.PATCH,
    sharded_state_load_model.PATCH,
    sharded_state_load_weights.PATCH,
    sharded_state_save_model.PATCH,
    untie_word_embeddings.PATCH,
    worker_reload_weights.PATCH,
    worker_weight_checksums.PATCH,
)


def apply_all(patches: tuple[Patch, ...] = PATCHES) -> dict[str, Status]:
    """Apply every patch that `VSS_DISABLE_PATCHES` leaves on; return each one's status by name.

    Raises:
        OptionError: the variable names a patch that does not exist.
        PatchError: a patch could not be made; those this call had made before it are undone.
    """
    disabled = envs.disabled_patches([patch.name for patch in patches])
    statuses: dict[str, Status] = {}
    finished = False
    try:
        for patch in patches:
            statuses[patch.name] = patch.apply(disabled=patch.name in disabled)
        finished = True
    finally:
        if not finished:
            for patch in reversed(patches):
                if statuses.get(patch.name) is Status.APPLIED:
                    patch.undo()
    return statuses
