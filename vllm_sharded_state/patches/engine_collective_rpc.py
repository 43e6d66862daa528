"""Let no block of a cache outlive the weights it was computed with.

What: `vllm.v1.engine.core.EngineCore.collective_rpc`.

Why: after new weights or KV scales the prefix cache and running requests go on reading blocks that were
    computed, or encoded, with the old ones. A sleeping engine is written to. When one of several
    workers fails, the answers of the others are taken for answers to the next call.

How: for the methods that change weights `reload.engine.collective_rpc` looks first whether they may run,
    takes the keyword `kv_cache`, and clears what is stale. All other methods pass through.

Since: vLLM 0.32 (seen in 0.32 and 0.33).

Until: the engine core itself knows which calls change weights.
"""

from typing import Any

from vllm_sharded_state.patches.contract import Function, Patch
from vllm_sharded_state.patches.inward import inward, stand_in


def make(original: Function) -> Function:
    """Return the method with the work handed over."""

    def collective_rpc(
        self: Any,
        method: Any,
        timeout: float | None = None,
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        return inward("reload.engine", "collective_rpc")(
            original, self, method, timeout, args, kwargs
        )

    return collective_rpc


class _Engine:
    """An engine core whose workers do nothing."""

    class model_executor:
        @staticmethod
        def collective_rpc(*_: Any) -> list[Any]:
            return []


def probe() -> bool:
    """Call the method on an engine without workers; does the call not arrive?"""
    from vllm.v1.engine.core import EngineCore

    calls: list[tuple[Any, ...]] = []
    engine: Any = _Engine()
    with stand_in("reload.engine", "collective_rpc", lambda *given: calls.append(given[1:])):
        EngineCore.collective_rpc(engine, "reload_weights", None, (), {"weights_path": "path"})
    return calls != [(engine, "reload_weights", None, (), {"weights_path": "path"})]


PATCH = Patch(
    name="engine_collective_rpc",
    module="vllm.v1.engine.core",
    symbol="EngineCore.collective_rpc",
    probe=probe,
    make=make,
)
