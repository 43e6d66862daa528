"""What attention layers keep of their scales once processed, rebuilt from the device buffers.

vLLM keeps each scale of an attention layer up to three times
(`vllm.model_executor.layers.attention.attention.set_default_quant_scales`):

- `_q_scale`, `_k_scale`, `_v_scale`, `_prob_scale`: float32 buffers that kernels read, of shape
  `()`, `[1]` or `[num_kv_heads]`
- `_q_scale_float`, ...: a Python float each
- `_k_scale_cpu`, `_v_scale_cpu`: float32 tensors of shape `()`
"""

import torch
from torch import nn

KINDS = ("q", "k", "v", "prob")
SCALE_BUFFERS = tuple(f"_{kind}_scale" for kind in KINDS)
KINDS_WITH_HOST_TENSOR = ("k", "v")


def adopt_loaded_scales(layer: nn.Module) -> None:
    """Finish an attention layer whose `_*_scale` buffers hold their final values already.

    Removes the placeholders that a checkpoint before processing would have filled (`k_scale`, ...,
    and zero points, which vLLM never reads: it supports symmetric scales only) and rebuilds the
    floats and host tensors. The buffers keep storage, shape and value. Of several heads' scales the
    float and the host tensor hold the greatest, as after
    `CompressedTensorsKVCacheMethod.process_weights_after_loading`.
    """
    for kind in KINDS:
        for placeholder in (f"{kind}_scale", f"{kind}_zero_point"):
            if hasattr(layer, placeholder):
                delattr(layer, placeholder)
        buffer = getattr(layer, f"_{kind}_scale", None)
        if buffer is None:
            continue
        value = buffer.max().item()
        setattr(layer, f"_{kind}_scale_float", value)
        if kind in KINDS_WITH_HOST_TENSOR:
            _set_host_tensor(layer, f"_{kind}_scale_cpu", value, buffer)


def _set_host_tensor(layer: nn.Module, name: str, value: float, buffer: torch.Tensor) -> None:
    host = getattr(layer, name, None)
    if (
        host is not None
        and host.shape == ()
        and not host.is_meta
        and host.untyped_storage().data_ptr() != buffer.untyped_storage().data_ptr()
    ):
        # In place, as a cold load does it: who holds the tensor sees the value, and it stays on the
        # device it was made on.
        host.fill_(value)
        return
    setattr(layer, name, torch.tensor(value, dtype=torch.float32, device="cpu"))
