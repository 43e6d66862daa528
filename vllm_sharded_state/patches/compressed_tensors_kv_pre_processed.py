"""Let compressed-tensors keep KV-cache scales that arrive already processed.

What: `vllm.model_executor.layers.quantization.compressed_tensors.compressed_tensors`
    `.CompressedTensorsKVCacheMethod.process_weights_after_loading`

Why: the class inherits `supports_pre_processed_weights = True`, but its method does not look at
    `weights_already_processed()`: it replaces the loaded buffers with its placeholder parameters,
    so every scale becomes 1.0, silently.

How: in that mode, and only there, `kv_scales.adopt_loaded_scales` does the work. The buffers keep
    the shape they were loaded with, `[1]` or `[num_kv_heads]`.

Since: vLLM 0.32 (seen in 0.32 and 0.33).

Until: upstream's method begins with the base class's test of `is_weights_pre_processed()`.
"""

from vllm_sharded_state.patches.contract import Patch
from vllm_sharded_state.patches.kv_cache_pre_processed import make, rebuilds

_MODULE = "vllm.model_executor.layers.quantization.compressed_tensors.compressed_tensors"


def probe() -> bool:
    """Let the method adopt scales of shape `[1]` and of two heads; does anything not match?"""
    from vllm.model_executor.layers.quantization.compressed_tensors import compressed_tensors

    method = object.__new__(compressed_tensors.CompressedTensorsKVCacheMethod)
    return not all(rebuilds(method, heads) for heads in (1, 2))


PATCH = Patch(
    name="compressed_tensors_kv_pre_processed",
    module=_MODULE,
    symbol="CompressedTensorsKVCacheMethod.process_weights_after_loading",
    probe=probe,
    make=make,
)
