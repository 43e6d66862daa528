"""Make a reload of weights a transaction.

What: `vllm.model_executor.model_loader.reload.inplace.reload_weights`, also where the model runners
    imported it by value.

Why: an update that fails half-way leaves the engine on meta tensors; rows of a fused layer that were not
    sent hold what the memory held; KV scales that were not sent become 1.0, and those of a model without
    KV quantization can't be sent at all; `is_checkpoint_format=False` reaches no buffers.

How: `reload.entry.reload_weights` builds each layer beside the live one and puts it in its place, or
    takes everything back. Engines whose weights it can't build so (torchao) are left to the original,
    with a warning; those in which new weights would not arrive are refused.

Since: vLLM 0.32 (seen in 0.32 and 0.33).

Until: upstream's own reload accounts for every element and can be taken back.
"""

from typing import Any

import torch

from vllm_sharded_state.patches.contract import Function, Patch
from vllm_sharded_state.patches.inward import inward, stand_in


def make(original: Function) -> Function:
    """Return the function with the work handed over."""

    def reload_weights(
        vllm_config: Any,
        model: torch.nn.Module,
        weights_iterator: Any = None,
        weights_path: str | None = None,
        is_checkpoint_format: bool = True,
    ) -> None:
        reason = inward("reload.unsupported", "reason")(vllm_config, model)
        if reason is None:
            inward("reload.entry", "reload_weights")(
                vllm_config, model, weights_iterator, weights_path, is_checkpoint_format
            )
            return
        if weights_iterator is None:
            inward("reload.entry", "refuse_sharded_state")(vllm_config, weights_path, reason)
        inward("reload.call", "refuse_choices")(reason)
        from vllm.logger import init_logger

        init_logger("vllm.sharded_state.reload").warning(
            "This reload is vLLM's own and can't be taken back when it fails: %s", reason
        )
        original(vllm_config, model, weights_iterator, weights_path, is_checkpoint_format)

    return reload_weights


def probe() -> bool:
    """Call the function with nothing to load; does the call not arrive?"""
    from vllm.model_executor.model_loader.reload import inplace

    calls: list[tuple[Any, ...]] = []
    given = (object(), torch.nn.Module(), iter(()), None, True)
    with (
        stand_in("reload.unsupported", "reason", lambda *_: None),
        stand_in("reload.entry", "reload_weights", lambda *args: calls.append(args)),
    ):
        try:
            inplace.reload_weights(*given)
        except AttributeError:  # the original looks into the configuration first
            return True
    return calls != [given]


PATCH = Patch(
    name="reload_weights",
    module="vllm.model_executor.model_loader.reload.inplace",
    symbol="reload_weights",
    probe=probe,
    make=make,
    # Not imported for this: one that is imported later gets the replacement by itself.
    importers_if_loaded=("vllm.v1.worker.gpu_model_runner", "vllm.v1.worker.gpu.model_runner"),
)
