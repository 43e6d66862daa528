"""Attention layers as far as their scales go, and rounding done without torch."""

import math
import struct

import torch
from vllm.model_executor.layers.attention.attention import set_default_quant_scales
from vllm.model_executor.layers.quantization.kv_cache import (
    BaseKVCacheMethod,
)
from vllm.utils.torch_utils import set_default_torch_dtype


def float32(value: float) -> float:
    """`value` as float32 holds it, without torch."""
    return struct.unpack("<f", struct.pack("<f", value))[0]


def bfloat16(value: float) -> float:
    """`value` rounded to the nearest bfloat16, by arithmetic: 8 significant bits."""
    mantissa, exponent = math.frexp(value)
    return math.ldexp(round(mantissa * 256), exponent - 8)


class Layer(torch.nn.Module):
    """What KV-cache methods need of an attention layer."""

    def __init__(self, method: BaseKVCacheMethod, num_kv_heads: int = 1) -> None:
        super().__init__()
        self.num_kv_heads = num_kv_heads
        self.kv_cache_dtype = "fp8"
        set_default_quant_scales(self, register_buffer=True)
        self.quant_method = method
        method.create_weights(self)

    def mirrors(self) -> dict[str, float]:
        return {
            name: float(value)
            for name, value in vars(self).items()
            if name.endswith(("_scale_float", "_scale_cpu"))
        }


def cold_scalar_layer(**scales: float) -> Layer:
    """A layer of the base method after a cold load, as vLLM does it in a bfloat16 model."""
    with set_default_torch_dtype(torch.bfloat16):
        layer = Layer(BaseKVCacheMethod(None))
        for name, value in scales.items():
            parameter = getattr(layer, name)
            parameter.weight_loader(parameter, torch.tensor([value], dtype=torch.float32))
        layer.quant_method.process_weights_after_loading(layer)
    return layer
