"""A call that changes weights, as each worker makes it: what comes of it is told, and nothing is raised.

An executor that waits for several workers stops at the first that raises, and takes what the others
answered for answers to its next call. So errors come back as results, and every answer is read.
"""

import pickle
from dataclasses import dataclass
from typing import Any

from vllm.logger import init_logger

from vllm_sharded_state.errors import ReloadPeerError, ShardedStateError

logger = init_logger("vllm.sharded_state.reload")


@dataclass(frozen=True)
class Answer:
    """What one worker says: what its method returned, or why it failed."""

    result: Any = None
    error: Exception | None = None


def attempt(worker: Any, method: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Answer:
    """Call `method` of `worker` (vLLM's, or the wrapper around it)."""
    try:
        return Answer(getattr(worker, method)(*args, **kwargs))
    except Exception as error:
        if not isinstance(error, ShardedStateError):
            logger.exception("%s failed", method)  # a traceback doesn't travel
        return Answer(error=_portable(error))


def first_error(answers: list[Answer]) -> Exception | None:
    """The error that tells most: one of a worker's own, rather than that of another one failing."""
    errors = [answer.error for answer in answers if answer.error is not None]
    return min(errors, key=lambda error: isinstance(error, ReloadPeerError), default=None)


def _portable(error: Exception) -> Exception:
    """`error`, or what says the same and can be sent to another process."""
    try:
        pickle.loads(pickle.dumps(error))
    except Exception:  # noqa: BLE001 - exceptions of other packages fail to do so in any way
        return RuntimeError(f"{type(error).__name__}: {error}")
    return error
