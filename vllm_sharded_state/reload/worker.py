"""vLLM's worker and the updates that it drives: one that fails anywhere ends at once, on every rank."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from . import session


def starting(worker: Any) -> None:
    """Before `Worker.start_weight_update`: give up an update that was started and never finished."""
    engine = getattr(
        worker, "weight_transfer_engine", None
    )  # another platform's worker may have none
    if engine is None or not worker._weight_update_active:
        return
    if session.of(engine.model) is not None:
        session.abandon(engine.model)
        _end(worker)


@contextmanager
def step(worker: Any, agree: bool) -> Iterator[None]:
    """Around a call of `Worker.update_weights` or `Worker.finish_weight_update`.

    An error ends the update, also one that came before anything was loaded. With `agree`, the call waits
    for all ranks to have succeeded. An update that vLLM does by itself is left alone.

    Raises:
        ReloadEndedError: the update has failed before.
        ReloadPeerError: the call failed on another rank.
    """
    engine = getattr(worker, "weight_transfer_engine", None)
    current = None if engine is None else session.of(engine.model)
    if current is None:
        yield
        return
    current.refuse_if_failed()
    try:
        yield
        if agree:
            current.agree()
    except BaseException as error:
        current.fail(error)
        _end(worker)
        raise


def _end(worker: Any) -> None:
    """As upstream does where receiving weights fails."""
    worker._weight_update_active = False
    worker.weight_transfer_engine.reset_weight_update_target()
