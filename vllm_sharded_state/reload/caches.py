"""What an engine computed with old weights: KV blocks, encodings of images; kept, or never read again."""

from typing import Any

from vllm.logger import init_logger

from vllm_sharded_state import envs
from vllm_sharded_state.errors import OptionError, ReloadCacheError

logger = init_logger("vllm.sharded_state.reload")


def choice(given: Any) -> str:
    """What to do with cached blocks, `clear` or `keep`: as the call says, else `VSS_RELOAD_KV_CACHE`.

    Raises:
        OptionError: it means nothing.
    """
    if given is None:
        return envs.reload_kv_cache()
    if given not in envs.RELOAD_KV_CACHE:
        raise OptionError(
            f"kv_cache={given!r} means nothing; give one of: {', '.join(envs.RELOAD_KV_CACHE)}"
        )
    return str(given)


def refuse_uncleared(engine: Any) -> None:
    """Raise `ReloadCacheError` where `clear` would leave blocks that somebody may read again.

    Only a KV connector can keep some: blocks of requests that do not run, and copies elsewhere.
    """
    connector = engine.scheduler.get_kv_connector()
    if connector is None:
        return
    for part in getattr(connector, "_connectors", [connector]):  # a MultiConnector's
        if _cannot_reset(part):
            raise ReloadCacheError(
                f"{type(part).__name__} keeps KV blocks that were computed with the old weights, and "
                "has no way to clear them. Nothing was read.\nClear its store yourself, and reload "
                "with kv_cache='keep' while generation is paused with clear_cache."
            )
    if engine.batch_queue or _held(engine.scheduler):
        raise ReloadCacheError(
            "The KV connector still transfers blocks that were computed with the old weights. Nothing "
            "was read.\nPause generation first (`pause_generation`), or wait for these requests."
        )


def clear(engine: Any) -> None:
    """Let nothing that was computed before be read again; running requests start over.

    They keep the tokens they have, and everything before the next one is computed anew. As the engine
    core's `_reset_caches` (v1/engine/core.py), but for the cache of processed multi-modal inputs: these
    do not depend on weights, and the frontend counts on it.

    Raises:
        ReloadCacheError: blocks are held that can't be freed.
    """
    running, _ = engine.scheduler.get_request_counts()
    cause = None
    try:
        cleared = engine.reset_prefix_cache(reset_running_requests=True, reset_connector=True)
    except RuntimeError as error:
        cleared, cause = False, error
    engine.scheduler.reset_encoder_cache()
    if not cleared:
        raise ReloadCacheError(
            "The model holds other weights now, and KV blocks computed with the old ones can't be "
            f"cleared{f' ({cause})' if cause else ''}.\nAbort all requests and call "
            "reset_prefix_cache(reset_connector=True) before anything is generated."
        ) from cause
    logger.info("KV cache cleared for new weights; %d running requests start over", running)


def _cannot_reset(connector: Any) -> bool:
    from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorBase_V1

    # Upstream's own tells nobody that it does nothing.
    return type(connector).reset_cache is KVConnectorBase_V1.reset_cache


def _held(scheduler: Any) -> bool:
    """Whether a request that is not running holds blocks."""
    running = {request.request_id for request in scheduler.running}
    return any(
        any(scheduler.kv_cache_manager.get_block_ids(name))
        for name in scheduler.requests
        if name not in running
    )
