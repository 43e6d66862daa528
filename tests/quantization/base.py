"""Quantization methods of the tests' own: how one is registered, and the parts that they share.

`config.json` names the quantization method `vss_methods` and, beside it, which of `METHODS` the linear
layers use. Every method starts from the same source tensors, a bf16 weight and one float32 gain for
each projection of a fused layer; what `process_weights_after_loading` makes of them is its own
affair, and `apply` computes the layer from what that left.
"""

from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from torch.nn import Parameter
from vllm.model_executor.layers.fused_moe.routed_experts import RoutedExperts
from vllm.model_executor.layers.linear import LinearBase, LinearMethodBase
from vllm.model_executor.layers.quantization import register_quantization_config
from vllm.model_executor.layers.quantization.base_config import (
    QuantizationConfig,
    QuantizeMethodBase,
)
from vllm.model_executor.layers.vocab_parallel_embedding import ParallelLMHead
from vllm.model_executor.utils import set_weight_attrs

NAME = "vss_methods"

#: Makes the method of one linear layer, from the config and the layer's name.
Maker = Callable[["MethodsConfig", str], QuantizeMethodBase]
METHODS: dict[str, Maker] = {}
#: Makes the method of fused experts, from their config.
EXPERTS_METHODS: dict[str, Callable[[Any], QuantizeMethodBase]] = {}
#: The same for the head.
HEAD_METHODS: dict[str, Maker] = {}
#: The same for attention layers, where a method has something to do there.
ATTENTION_METHODS: dict[str, Maker] = {}


def method(name: str) -> Callable[[type], type]:
    """Register a class, made as `cls(config, prefix)`, under `name`."""

    def keep(cls: type) -> type:
        assert name not in METHODS, name
        METHODS[name] = cls
        return cls

    return keep


class MethodsConfig(QuantizationConfig):
    """`method` names the method of the linear layers; `seed` is for the random ones."""

    def __init__(self, chosen: str, seed: int) -> None:
        super().__init__()
        self.chosen = chosen
        self.seed = seed
        self.kept: dict[str, Any] = {}

    def get_name(self) -> str:
        return NAME

    def get_supported_act_dtypes(self) -> list[torch.dtype]:
        return [torch.bfloat16]

    @classmethod
    def get_min_capability(cls) -> int:
        return 0

    @staticmethod
    def get_config_filenames() -> list[str]:
        return []

    @classmethod
    def from_config(cls, config: dict[str, Any]) -> "MethodsConfig":
        return cls(config["method"], config.get("seed", 0))

    def get_quant_method(self, layer: nn.Module, prefix: str) -> QuantizeMethodBase | None:
        from vllm.model_executor.layers.attention import Attention

        if isinstance(layer, RoutedExperts) and self.chosen in EXPERTS_METHODS:
            return EXPERTS_METHODS[self.chosen](layer.moe_config)
        if isinstance(layer, ParallelLMHead) and self.chosen in HEAD_METHODS:
            return HEAD_METHODS[self.chosen](self, prefix)
        if isinstance(layer, LinearBase):
            return METHODS[self.chosen](self, prefix)
        if isinstance(layer, Attention) and self.chosen in ATTENTION_METHODS:
            return ATTENTION_METHODS[self.chosen](self, prefix)
        return None


def enter() -> None:
    """Make the methods known to vLLM, through its own public decorator."""
    register_quantization_config(NAME)(MethodsConfig)


class Plain(LinearMethodBase):
    """Declares the source tensors, leaves them as they are, and computes from them."""

    #: Whether a method declares what only some of those that do so keep.
    supports_pre_processed_weights = False

    def __init__(self, config: MethodsConfig, prefix: str) -> None:
        self.config = config
        self.prefix = prefix

    def create_weights(
        self,
        layer: nn.Module,
        input_size_per_partition: int,
        output_partition_sizes: list[int],
        input_size: int,
        output_size: int,
        params_dtype: torch.dtype,
        **extra_weight_attrs: Any,
    ) -> None:
        loader = extra_weight_attrs["weight_loader"]
        rows = sum(output_partition_sizes)
        layer.widths = list(output_partition_sizes)
        weight = frozen(torch.empty(rows, input_size_per_partition, dtype=params_dtype))
        layer.register_parameter("weight", weight)
        set_weight_attrs(weight, {"input_dim": 1, "output_dim": 0, "weight_loader": loader})
        gain = frozen(torch.empty(len(output_partition_sizes), dtype=torch.float32))
        layer.register_parameter("gain", gain)
        set_weight_attrs(gain, {"needs_scalar_to_array": True, "weight_loader": loader})

    def process_weights_after_loading(self, layer: nn.Module) -> None:
        self.process(layer)

    def process(self, layer: Any) -> None:
        """Bring `layer` from source to runtime layout."""

    def apply(
        self, layer: nn.Module, x: torch.Tensor, bias: torch.Tensor | None = None
    ) -> torch.Tensor:
        return product(x, self.matrix(layer), bias)

    def matrix(self, layer: Any) -> torch.Tensor:
        """The layer's `[in, out]` float32 matrix, from what processing left."""
        return whole(layer).t()


def product(x: torch.Tensor, matrix: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
    """`x @ matrix` in float32, plus the bias, in the dtype of `x`."""
    y = x.float() @ matrix
    return (y if bias is None else y + bias.float()).to(x.dtype)


def frozen(tensor: torch.Tensor) -> Parameter:
    """A parameter that needs no gradient."""
    return Parameter(tensor, requires_grad=False)


def whole(layer: Any) -> torch.Tensor:
    """The `[out, in]` float32 weight that the source tensors stand for."""
    gains = layer.gain.data.repeat_interleave(torch.tensor(layer.widths))
    return layer.weight.data.float() * gains[:, None]


def forget(layer: Any, *names: str) -> None:
    """Delete source tensors."""
    for name in names or ("weight", "gain"):
        delattr(layer, name)


def packed(layer: Any) -> tuple[torch.Tensor, float]:
    """The weight as a kernel would want it: `[in, out]` int8, and the float that scales it."""
    full = whole(layer)
    alpha = float(full.abs().max()) / 127
    return (full / alpha).round().to(torch.int8).t().contiguous(), alpha


def unpacked(ints: torch.Tensor, alpha: float) -> torch.Tensor:
    """The `[in, out]` float32 matrix that `packed` gave."""
    return ints.float() * alpha


class Packing(Plain):
    """Packs the weight, deletes the source tensors, and keeps the two results somewhere."""

    def process(self, layer: Any) -> None:
        ints, alpha = packed(layer)
        forget(layer)
        self.put(layer, ints, alpha)

    def matrix(self, layer: Any) -> torch.Tensor:
        return unpacked(*self.got(layer))

    def put(self, layer: Any, ints: torch.Tensor, alpha: float) -> None:
        raise NotImplementedError

    def got(self, layer: Any) -> tuple[torch.Tensor, float]:
        raise NotImplementedError
