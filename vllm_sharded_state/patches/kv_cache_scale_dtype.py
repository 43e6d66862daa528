"""Keep KV-cache scales in float32 while they are loaded.

What: `vllm.model_executor.layers.quantization.kv_cache.KVCacheScaleParameter.__new__`

Why: the parameter is made with `torch.tensor(-1.0)`, so it takes the default dtype, which is the
    model's while a model is built. A float32 scale of 0.0123 is rounded through bfloat16 to 0.01233
    on a cold load. An update of the weights makes the parameter anew, outside of that default, and
    keeps 0.0123: the same checkpoint gives two engines.

How: the parameter is made with float32 as the default dtype. Everything after it (the buffers
    `_k_scale`, ..., and the kernels) is float32 already. Each parameter gets a loader of its own
    that calls the class's and says, once a process and dtype, that a value now differs from what
    the model's dtype would have held.

Since: vLLM 0.32 (seen in 0.32 and 0.33).

Until: upstream names the dtype: `torch.tensor(-1.0, dtype=torch.float32)`.
"""

from typing import Any

import torch

from vllm_sharded_state.patches.contract import Function, Patch

_told: set[torch.dtype] = set()


def load_and_tell(param: torch.nn.Parameter, loaded_weight: torch.Tensor) -> None:
    """Load a scale as the parameter's class does; log once if the model's dtype would round it."""
    type(param).weight_loader(param, loaded_weight)
    dtype = torch.get_default_dtype()
    if dtype in _told or dtype == torch.float32 or not loaded_weight.is_floating_point():
        return
    exact = loaded_weight.detach().float()
    rounded = exact.to(dtype).float()
    if torch.equal(exact, rounded):
        return
    _told.add(dtype)
    from vllm.logger import init_logger

    init_logger("vllm.sharded_state.patches").info(
        "KV-cache scales stay float32: a scale of %.9g keeps its value, which %s would have "
        "rounded to %.9g (logged once).",
        exact.flatten()[0].item(),
        dtype,
        rounded.flatten()[0].item(),
    )


def make(original: Function) -> Function:
    """Return `KVCacheScaleParameter.__new__` with float32 as its default dtype."""

    def new(cls: type[torch.nn.Parameter], *args: Any, **kwargs: Any) -> torch.nn.Parameter:
        from vllm.utils.torch_utils import set_default_torch_dtype

        with set_default_torch_dtype(torch.float32):
            parameter: torch.nn.Parameter = original(cls, *args, **kwargs)
        parameter.weight_loader = load_and_tell
        return parameter

    return new


def probe() -> bool:
    """Make a parameter while bfloat16 is the default; is it bfloat16?"""
    from vllm.model_executor.layers.quantization.kv_cache import KVCacheScaleParameter
    from vllm.utils.torch_utils import set_default_torch_dtype

    with set_default_torch_dtype(torch.bfloat16):
        return bool(KVCacheScaleParameter().dtype != torch.float32)


PATCH = Patch(
    name="kv_cache_scale_dtype",
    module="vllm.model_executor.layers.quantization.kv_cache",
    symbol="KVCacheScaleParameter.__new__",
    probe=probe,
    make=make,
)
