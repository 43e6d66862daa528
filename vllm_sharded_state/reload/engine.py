"""New weights as the engine core sees them: between two steps, on all workers, and no stale block after.

The engine core handles one call at a time, and none during a step. A batch that was sent to the workers
before the call is computed before it too: each worker takes its calls in turn.
"""

from collections.abc import Callable
from typing import Any

from vllm_sharded_state.errors import ReloadAsleepError, ReloadBusyError, ShardedStateError

from . import caches
from .attempt import Answer, attempt, first_error

#: Methods of vLLM's worker after which, or after whose failure, the model may hold other weights.
CHANGES = frozenset({"reload_weights", "update_weights", "finish_weight_update"})
#: Those and the ones that prepare for them.
TOUCHES = CHANGES | {"start_weight_update", "start_draft_weight_update"}


def collective_rpc(
    call: Callable[..., list[Any]],
    engine: Any,
    method: Any,
    timeout: float | None,
    args: tuple[Any, ...],
    kwargs: dict[str, Any] | None,
) -> list[Any]:
    """What stands for `EngineCore.collective_rpc`, which is `call`; other methods are passed on.

    A method that changes weights takes `kv_cache`, `clear` or `keep`, which no worker sees.

    Returns:
        What the method returned on each worker.

    Raises:
        ShardedStateError: one of its kinds; what the model holds is told there.
        Exception: of the method itself, the first of a worker that failed.
    """
    if not isinstance(method, str) or method not in TOUCHES:
        return call(engine, method, timeout, args, kwargs)
    kwargs = dict(kwargs or {})
    keep = method not in CHANGES or caches.choice(kwargs.pop("kv_cache", None)) == "keep"
    _refuse_asleep(engine)
    _refuse_out_of_step(engine)
    if not keep:
        caches.refuse_uncleared(engine)
    answers: list[Answer] = []
    error: BaseException | None = None
    try:
        answers = call(engine, attempt, timeout, (method, args, kwargs), None)
        error = first_error(answers)
    except BaseException as raised:  # noqa: BLE001 - what the workers did then is not known
        error = raised
    if not keep and _may_be_stale(method, error, answers):
        caches.clear(engine)
    elif method in CHANGES and error is None:
        # The workers forget theirs, and the scheduler must not count on it.
        engine.scheduler.reset_encoder_cache()
    if error is not None:
        raise error
    if method == "finish_weight_update":
        engine.model_executor.reset_encoder_cache()  # `reload_weights` does so itself
    return [answer.result for answer in answers]


def _may_be_stale(method: str, error: BaseException | None, answers: list[Answer]) -> bool:
    """Whether something that was computed before can differ from what would be computed now."""
    if error is None:
        return method != "update_weights"  # until it is finished, more will come
    if method != "reload_weights" or not answers:
        return True  # requests may have run between the parts of an update; or nothing is known
    errors = [answer.error for answer in answers if answer.error is not None]
    return any(not isinstance(error, ShardedStateError) or error.changed for error in errors)


def _refuse_asleep(engine: Any) -> None:
    if "weights" in engine.model_executor.sleeping_tags:
        raise ReloadAsleepError(
            "The engine sleeps, and the memory of its weights is not there. Nothing was read.\n"
            "Call wake_up(tags=['weights']) first; the KV cache may sleep on."
        )


def _refuse_out_of_step(engine: Any) -> None:
    """Data-parallel ranks that share experts exchange tensors in each step, and agree on new weights.

    One of them would wait in its step for the other, which waits for it to agree.
    """
    from vllm.v1.engine.core import DPEngineCoreProc

    if isinstance(engine, DPEngineCoreProc) and (
        engine.engines_running or not engine.is_scheduler_paused()
    ):
        raise ReloadBusyError(
            "Data-parallel ranks that share experts step together, so they take new weights together "
            "only while generation is paused. Nothing was read.\nCall pause_generation (or "
            "sleep(level=0)) first, and resume after."
        )
