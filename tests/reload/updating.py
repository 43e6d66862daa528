"""An update of weights as the weight-transfer engines of vLLM make it, without a transport."""

import itertools
from collections.abc import Collection, Iterator
from typing import Any

PHASES = ("start", "send", "finish")


def update(
    model: Any,
    weights: Iterator[tuple[str, Any]],
    size: int,
    phases: Collection[str] = PHASES,
    reused: bool = False,
) -> set[str]:
    """Send `weights`, `size` tensors a call (0: in one call); the names that `load_weights` returned.

    reused: the memory of what was sent is overwritten after each call.
    """
    import torch
    from vllm.model_executor.model_loader import reload
    from vllm.model_executor.model_loader.mtp_validation import disable_mtp_completeness_check

    loaded: set[str] = set()
    if "start" in phases:
        reload.initialize_layerwise_reload(model)
    if "send" in phases and not size:
        loaded |= model.load_weights(weights) or set()
    while "send" in phases and size and (chunk := list(itertools.islice(weights, size))):
        with disable_mtp_completeness_check():
            loaded |= model.load_weights(chunk) or set()
        for _, tensor in chunk if reused else ():
            tensor.view(-1).view(torch.uint8).fill_(0xFF)
    if "finish" in phases:
        from vllm.config import get_current_vllm_config

        reload.finalize_layerwise_reload(model, get_current_vllm_config().model_config)
    return loaded
