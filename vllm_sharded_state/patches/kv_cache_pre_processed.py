"""Rebuild everything derived from KV-cache scales when they arrive already processed.

What: `vllm.model_executor.layers.quantization.kv_cache.BaseKVCacheMethod`
    `.process_weights_after_loading`

Why: under `weights_already_processed()` the method rebuilds `_{q,k,v}_scale_float` and
    `_{k,v}_scale_cpu` from the loaded buffers, but leaves `_prob_scale_float` at its default, dies
    on one scale a head (`.item()` of several elements), and on the CPU makes `_k_scale_cpu` the
    very buffer, so that whoever writes one changes the other.

How: in that mode, and only there, `kv_scales.adopt_loaded_scales` does the work.

Since: vLLM 0.32 (seen in 0.32 and 0.33).

Until: upstream rebuilds `_prob_scale_float`, takes the greatest of several heads' scales, and
    copies into `_k_scale_cpu` instead of replacing it.
"""

from typing import Any

import torch

from vllm_sharded_state.patches.contract import Function, Patch
from vllm_sharded_state.state.kv_scales import KINDS, adopt_loaded_scales


def make(original: Function) -> Function:
    """Return the method with its already-processed mode replaced."""

    def process_weights_after_loading(self: Any, layer: torch.nn.Module) -> None:
        from vllm.model_executor.utils import is_weights_pre_processed

        if is_weights_pre_processed():
            adopt_loaded_scales(layer)
        else:
            original(self, layer)

    return process_weights_after_loading


def rebuilds(method: Any, heads: int) -> bool:
    """Tell whether `method` rebuilds everything from `heads` loaded scales a kind (0: shape `()`).

    Scales are powers of two, so every dtype holds them.
    """
    from vllm.model_executor.utils import weights_already_processed

    layer = torch.nn.Module()
    expected = {}
    for index, kind in enumerate(KINDS):
        greatest = 2.0**-index
        scales = torch.full((heads,) if heads else (), greatest / 2, dtype=torch.float32)
        scales.view(-1)[-1] = greatest
        layer.register_buffer(f"_{kind}_scale", scales.clone())
        setattr(layer, f"{kind}_scale", torch.nn.Parameter(torch.ones(1), requires_grad=False))
        setattr(layer, f"{kind}_zero_point", torch.nn.Parameter(torch.zeros(1)))
        expected[kind] = scales
    layer._k_scale_cpu = torch.tensor(1.0)
    layer._v_scale_cpu = torch.tensor(1.0)
    try:
        with weights_already_processed():
            method.process_weights_after_loading(layer)
    except RuntimeError:  # .item() of several elements
        return False
    return (
        not list(layer.parameters())
        and all(torch.equal(getattr(layer, f"_{kind}_scale"), expected[kind]) for kind in KINDS)
        and all(
            getattr(layer, f"_{kind}_scale_float", None) == expected[kind].max().item()
            for kind in KINDS
        )
        and all(
            getattr(layer, f"_{kind}_scale_cpu").shape == ()
            and getattr(layer, f"_{kind}_scale_cpu").item() == expected[kind].max().item()
            and getattr(layer, f"_{kind}_scale_cpu").data_ptr()
            != getattr(layer, f"_{kind}_scale").data_ptr()
            for kind in ("k", "v")
        )
    )


def probe() -> bool:
    """Let the method adopt scales of shape `()` and of two heads; does anything not match?"""
    from vllm.model_executor.layers.quantization.kv_cache import BaseKVCacheMethod

    method = object.__new__(BaseKVCacheMethod)
    return not all(rebuilds(method, heads) for heads in (0, 2))


PATCH = Patch(
    name="kv_cache_pre_processed",
    module="vllm.model_executor.layers.quantization.kv_cache",
    symbol="BaseKVCacheMethod.process_weights_after_loading",
    probe=probe,
    make=make,
)
