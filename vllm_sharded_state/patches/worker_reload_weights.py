"""Let a call of `reload_weights` choose, and say what was loaded.

What: `vllm.v1.worker.worker_base.WorkerWrapperBase.reload_weights`, which upstream hands on to the worker
    of whatever platform.

Why: `collective_rpc("reload_weights")` takes no choice but where the weights come from, and returns None:
    nobody learns what was loaded.

How: `reload.call.reload_weights` takes `atomic` and `digest` out, calls on, and returns the report. It is
    the wrapper that is changed, because every executor calls its worker through it, and because the
    modules of workers may not be imported before the platform has prepared for them.

Since: vLLM 0.32 (seen in 0.32).

Until: upstream's `Worker.reload_weights` has such arguments, and returns what the model runner does.
"""

import functools
from types import SimpleNamespace
from typing import Any

from vllm_sharded_state.patches.contract import Function, Patch
from vllm_sharded_state.patches.inward import inward, stand_in


def make(original: Function) -> Function:
    """Return the method with our arguments, and an answer."""

    def reload_weights(self: Any, *args: Any, **kwargs: Any) -> dict[str, Any] | None:
        report: dict[str, Any] | None = inward("reload.call", "reload_weights")(
            self.worker, functools.partial(original, self), args, kwargs
        )
        return report

    return reload_weights


def probe() -> bool:
    """Call the method of a wrapper around a toy; does the answer not come back?"""
    from vllm.v1.worker.worker_base import WorkerWrapperBase

    wrapper = WorkerWrapperBase.__new__(WorkerWrapperBase)
    wrapper.worker = SimpleNamespace(reload_weights=lambda **_: None)
    with stand_in("reload.call", "reload_weights", lambda *_: {}):
        return wrapper.reload_weights(atomic="layer") is None


PATCH = Patch(
    name="worker_reload_weights",
    module="vllm.v1.worker.worker_base",
    symbol="WorkerWrapperBase.reload_weights",
    probe=probe,
    make=make,
    handed_on=True,
)
