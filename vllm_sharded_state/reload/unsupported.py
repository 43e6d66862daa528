"""Which engines' weights can't be built beside the live ones, so that vLLM's own reload has to do."""

from typing import Any

from torch import nn
from vllm.model_executor.layers.quantization.online.fp8 import OnlineLinearBase
from vllm.model_executor.layers.quantization.online.moe_base import OnlineMoEMethodBase
from vllm.model_executor.model_loader.utils import get_model_architecture

#: Backends of vllm/distributed/weight_transfer that write into a model without its `load_weights`.
_WRITE_BY_THEMSELVES = ("nccl_m2n", "sharded_rdt")


def update_reason(vllm_config: Any, model: nn.Module) -> str | None:
    """As `reason`, of an update that comes in calls, such as through a weight-transfer engine."""
    transfer = vllm_config.weight_transfer_config
    if transfer is not None and transfer.backend in _WRITE_BY_THEMSELVES:
        return f"the transfer backend {transfer.backend} writes into the model by itself"
    return reason(vllm_config, model)


def reason(vllm_config: Any, model: nn.Module) -> str | None:
    """Why a reload of `model` can't be a transaction; None where it can."""
    if vllm_config.model_config.quantization == "torchao":
        return "torchao quantizes weights while they are loaded"
    for name, module in model.named_modules():
        method = getattr(module, "quant_method", None)
        if isinstance(method, OnlineLinearBase | OnlineMoEMethodBase):
            return f"{name} is quantized while it is loaded ({type(method).__name__})"
    built, named = (
        type(model).__name__,
        get_model_architecture(vllm_config.model_config)[0].__name__,
    )
    if built != named:
        return f"it is a {built}, and the configuration names a {named}"
    if hasattr(model, "process_weights_after_loading"):
        return f"{type(model).__name__} computes tensors from the weights of several layers"
    return None
