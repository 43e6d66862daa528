"""The call of `reload_weights` on a worker: arguments of ours beside upstream's, and an answer.

Upstream hands its arguments from the worker to the model runner and drops what comes back. So ours travel
beside them, in a context variable that lasts as long as the call, and the answer comes back there.
"""

import inspect
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from typing import Any

from torch import nn

from vllm_sharded_state import envs
from vllm_sharded_state.errors import OptionError, ReloadArgumentError

from . import lost

#: Our arguments, and what each may be.
OURS: Mapping[str, tuple[Any, ...]] = {"atomic": envs.RELOAD_ATOMIC, "digest": (False, True)}


@dataclass
class Call:
    """A call that runs: what was chosen in it (None where nothing was); once done, what it reports."""

    atomic: str | None = None
    digest: bool | None = None
    report: dict[str, Any] | None = None

    def wanted_atomic(self, model: nn.Module) -> str:
        """`model` or `layer`, from the call or the environment. Raises `OptionError`.

        Of weights that are lost there is nothing to keep, so that for them it is `layer` always.
        """
        return "layer" if lost.is_lost(model) else self.atomic or envs.reload_atomic()

    def wants_digest(self) -> bool:
        """Whether digests are wanted, by the call or the environment. Raises `OptionError`."""
        return envs.reload_digest() if self.digest is None else self.digest


_running: ContextVar[Call | None] = ContextVar("vss_reload_call", default=None)


def running() -> Call:
    """The call that runs here; one without choices where somebody calls past the worker."""
    return _running.get() or Call()


@contextmanager
def made(**chosen: Any) -> Iterator[Call]:
    """A call that lasts as long as the block. Raises `OptionError` for a value that means nothing."""
    for name, value in chosen.items():
        if value is not None and value not in OURS[name]:
            allowed = ", ".join(map(repr, OURS[name]))
            raise OptionError(f"{name}={value!r} means nothing; give one of: {allowed}")
    call = Call(**chosen)
    token = _running.set(call)
    try:
        yield call
    finally:
        _running.reset(token)


def reload_weights(
    worker: Any, reload: Callable[..., object], args: tuple[Any, ...], kwargs: Mapping[str, Any]
) -> dict[str, Any] | None:
    """Call `reload`, upstream's method of `worker`, with upstream's arguments, and with ours in mind.

    Returns what `Report.as_dict` gives; None where vLLM's own reload did the work.

    Raises:
        ReloadArgumentError: a name that is neither's; nothing was read.
        OptionError: a value of ours that means nothing; nothing was read.
        ReloadError: as `entry.reload_weights`.
    """
    known = inspect.signature(worker.model_runner.reload_weights).parameters
    unknown = sorted(kwargs.keys() - known.keys() - OURS.keys())
    if unknown:
        raise ReloadArgumentError(
            f"reload_weights has no argument {', '.join(unknown)}; nothing was read. It has: "
            f"{', '.join(sorted({*known, *OURS}))}."
        )
    with made(**{name: value for name, value in kwargs.items() if name in OURS}) as call:
        reload(*args, **{name: value for name, value in kwargs.items() if name in known})
    return call.report


def refuse_choices(reason: str) -> None:
    """Raise `ReloadArgumentError` if anything was chosen for the call that runs, which upstream makes."""
    call = running()
    chosen = [name for name in OURS if getattr(call, name) is not None]
    if chosen:
        raise ReloadArgumentError(
            f"{', '.join(chosen)}: this reload is vLLM's own, which knows no such argument "
            f"({reason}). Leave it out."
        )
