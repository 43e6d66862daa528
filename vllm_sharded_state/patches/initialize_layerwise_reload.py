"""Let an update of weights that comes in calls begin as a transaction.

What: `vllm.model_executor.model_loader.reload.layerwise.initialize_layerwise_reload`, also where the
    package `reload` re-exports it.

Why: between this function and `finalize_layerwise_reload` the model lies on the meta device, layer by
    layer. Weight-transfer engines and trainers call the two around their calls of `load_weights`; an
    error in between leaves meta tensors, and a fused layer that was sent in part is filled with
    whatever the memory held.

How: `reload.session.begin` starts a transaction on the model, which its `load_weights` then feeds, and
    nothing of the model is touched. Where that can't be (torchao, backends that write into the model
    by themselves), the original runs, with a warning. Upstream's own `reload_weights` and
    torchao, which imported the function by value, keep the original: what they do is not for here.

Since: vLLM 0.32 (seen in 0.32 and 0.33; `reload/` is the same in both).

Until: upstream's layer-wise reload accounts for every element and can be taken back.
"""

import torch

from vllm_sharded_state.patches.contract import Function, Patch
from vllm_sharded_state.patches.inward import inward, stand_in


def make(original: Function) -> Function:
    """Return the function with the work handed over."""

    def initialize_layerwise_reload(model: torch.nn.Module) -> None:
        if not inward("reload.session", "begin")(model):
            original(model)

    return initialize_layerwise_reload


def probe() -> bool:
    """Initialize an empty module; does the call not arrive?"""
    from vllm.model_executor.model_loader.reload import layerwise

    model = torch.nn.Module()
    seen: list[object] = []

    def begin(model: object) -> bool:
        seen.append(model)
        return True

    with stand_in("reload.session", "begin", begin):
        layerwise.initialize_layerwise_reload(model)
    layerwise.LAYERWISE_INFO.pop(model, None)
    return seen != [model]


PATCH = Patch(
    name="initialize_layerwise_reload",
    module="vllm.model_executor.model_loader.reload.layerwise",
    symbol="initialize_layerwise_reload",
    probe=probe,
    make=make,
    importers=("vllm.model_executor.model_loader.reload",),
)
