"""Give a KV-cache method its scales in runtime layout, and let it rebuild the host mirrors itself.

Upstream's `weights_already_processed()` tells a method that its weights need no processing. Only the
methods whose code for that case this package has mended are run so (see
`patches/kv_cache_pre_processed.py`); that a class sets `supports_pre_processed_weights` proves nothing.
"""

from collections.abc import Mapping
from typing import Any

import torch
from torch import nn
from vllm.model_executor.layers.quantization.base_config import QuantizeMethodBase
from vllm.model_executor.layers.quantization.kv_cache import BaseKVCacheMethod
from vllm.model_executor.utils import weights_already_processed

from .state.kv_scales import SCALE_BUFFERS
from .state.units import Unit
from .state.walk import join


class _Adopting(QuantizeMethodBase):
    """Stands in for a method while upstream processes the model; steps back when it has been asked."""

    def __init__(self, method: QuantizeMethodBase) -> None:
        self.method = method
        self.requires_device_loading = method.requires_device_loading

    def create_weights(self, layer: nn.Module, *weight_args: Any, **extra: Any) -> None:
        """Not called: the weights exist."""
        raise NotImplementedError

    def apply(self, layer: nn.Module, *args: Any, **kwargs: Any) -> torch.Tensor:
        """Not called: the method itself is back before the model runs."""
        raise NotImplementedError

    def process_weights_after_loading(self, layer: nn.Module) -> None:
        """Run the method's own code for weights that are processed already."""
        layer.quant_method = self.method
        with weights_already_processed():
            self.method.process_weights_after_loading(layer)


def can_adopt(unit: Unit) -> bool:
    """Whether the unit is an attention layer whose KV-cache method was mended for it."""
    method = getattr(unit.root, "quant_method", None)
    if not isinstance(method, BaseKVCacheMethod):
        return False
    return hasattr(type(method).process_weights_after_loading, "__vss_patch__")


def adopt(unit: Unit, saved: Mapping[str, torch.Tensor]) -> None:
    """Register the saved `_*_scale` buffers of an attention layer, and have them taken as they are.

    `saved` maps paths to tensors: `_k_scale`, `_v_scale`, `_q_scale`, `_prob_scale` below the unit's
    name, each a scalar, `[1]` or `[num_kv_heads]` in float32.
    """
    layer = unit.root
    for name in SCALE_BUFFERS:
        scale = saved.get(join(unit.name, name))
        current = getattr(layer, name, None)
        if scale is not None and isinstance(current, torch.Tensor):
            layer.register_buffer(name, scale.to(current.device, copy=True))
    layer.quant_method = _Adopting(layer.quant_method)
