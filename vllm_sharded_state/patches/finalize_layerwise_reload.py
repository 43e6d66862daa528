"""Let an update of weights that came in calls end as a transaction.

What: `vllm.model_executor.model_loader.reload.layerwise.finalize_layerwise_reload`, also where the
    package `reload` re-exports it.

Why: it is the other end of `initialize_layerwise_reload`, whose patch says what is wrong.

How: where an update was begun by `reload.session.begin`, `reload.session.finish` sees that all of it has
    come, on every rank, and keeps it, or takes it back. Otherwise the original runs.

Since: vLLM 0.32 (seen in 0.32 and 0.33; `reload/` is the same in both).

Until: upstream's layer-wise reload accounts for every element and can be taken back.
"""

from typing import Any

import torch

from vllm_sharded_state.patches.contract import Function, Patch
from vllm_sharded_state.patches.inward import inward, stand_in


def make(original: Function) -> Function:
    """Return the function with the work handed over."""

    def finalize_layerwise_reload(model: torch.nn.Module, *args: Any, **kwargs: Any) -> None:
        if not inward("reload.session", "finish")(model):
            original(model, *args, **kwargs)

    return finalize_layerwise_reload


def probe() -> bool:
    """Finalize an empty module; does the call not arrive?"""
    from vllm.model_executor.model_loader.reload import layerwise

    model = torch.nn.Module()
    seen: list[object] = []

    def finish(model: object) -> bool:
        seen.append(model)
        return True

    with stand_in("reload.session", "finish", finish):
        layerwise.finalize_layerwise_reload(model, None)
    layerwise.LAYERWISE_INFO.pop(model, None)
    return seen != [model]


PATCH = Patch(
    name="finalize_layerwise_reload",
    module="vllm.model_executor.model_loader.reload.layerwise",
    symbol="finalize_layerwise_reload",
    probe=probe,
    make=make,
    importers=("vllm.model_executor.model_loader.reload",),
)
