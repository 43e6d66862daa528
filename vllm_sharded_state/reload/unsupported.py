"""Which engines can't take new weights as a transaction: refused, or left to vLLM's own reload."""

from typing import Any

from torch import nn
from vllm.config import CompilationMode
from vllm.model_executor.model_loader.utils import get_model_architecture
from vllm.model_executor.offloader import NoopOffloader, UVAOffloader, get_offloader

from vllm_sharded_state.errors import ReloadUnsupportedError

#: Backends of vllm/distributed/weight_transfer that write into a model without its `load_weights`.
_WRITE_BY_THEMSELVES = ("nccl_m2n", "sharded_rdt")


def update_reason(vllm_config: Any, model: nn.Module) -> str | None:
    """As `reason`, of an update that comes in calls, such as through a weight-transfer engine."""
    transfer = vllm_config.weight_transfer_config
    if transfer is not None and transfer.backend in _WRITE_BY_THEMSELVES:
        return f"the transfer backend {transfer.backend} writes into the model by itself"
    return reason(vllm_config, model)


def reason(vllm_config: Any, model: nn.Module) -> str | None:
    """Why vLLM's own reload has to do, which can't be taken back; None where a transaction can.

    Raises `ReloadUnsupportedError` where that one goes wrong as well.
    """
    refuse(vllm_config, model)
    if vllm_config.model_config.quantization == "torchao":
        return "torchao quantizes weights while they are loaded"
    built, named = (
        type(model).__name__,
        get_model_architecture(vllm_config.model_config)[0].__name__,
    )
    if built != named:
        return f"it is a {built}, and the configuration names a {named}"
    return None


def refuse(vllm_config: Any, model: nn.Module) -> None:
    """Raise `ReloadUnsupportedError` where new weights would not, or not all, reach the kernels."""
    if vllm_config.parallel_config.enable_eplb:
        raise ReloadUnsupportedError(
            "EPLB moves experts between ranks, and new weights come in the order in which the engine "
            "started. Start it without enable_eplb to update its weights."
        )
    if _is_offloaded():
        raise ReloadUnsupportedError(
            f"{type(get_offloader()).__name__} keeps weights in host memory beside the model. Start the "
            "engine without cpu_offload_gb and offload_group_size to update its weights."
        )
    if _is_frozen(vllm_config):
        raise ReloadUnsupportedError(
            "The compiler has frozen the old weights into the graph (max_autotune or freezing in "
            "inductor_compile_config), where new ones don't reach.\nStart the engine without it, or "
            "with enforce_eager=True, to update its weights."
        )
    if hasattr(model, "process_weights_after_loading"):
        raise ReloadUnsupportedError(
            f"{type(model).__name__} computes tensors from the weights of several layers after loading, "
            "which vLLM does not do again for new weights. Start the engine anew."
        )


def _is_offloaded() -> bool:
    """Whether a part of a model in this process lies in host memory; the CPU's own never does."""
    offloader = get_offloader()
    if isinstance(offloader, UVAOffloader):
        return offloader.cpu_offload_bytes > 0
    return not isinstance(offloader, NoopOffloader)


def _is_frozen(vllm_config: Any) -> bool:
    """Whether inductor was told to make constants of the weights.

    On the CPU `max_autotune` does (vllm/v1/worker/cpu_model_runner.py, `warming_up_model`).
    """
    import torch._inductor.config as inductor

    compilation = vllm_config.compilation_config
    if compilation.mode in (None, CompilationMode.NONE) or compilation.backend == "eager":
        return False
    options = compilation.inductor_compile_config
    on_cpu = vllm_config.device_config.device_type == "cpu"
    return bool(
        options.get("freezing", inductor.freezing) or (on_cpu and options.get("max_autotune"))
    )
