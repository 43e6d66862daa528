"""What all of the methods share: a bf16 weight is loaded, `repack` changes it, `multiply` uses it."""

from typing import Any, ClassVar

import torch
from torch import nn
from vllm.model_executor.layers.linear import LinearBase, LinearMethodBase, UnquantizedLinearMethod
from vllm.model_executor.layers.quantization import register_quantization_config
from vllm.model_executor.layers.quantization.base_config import QuantizationConfig
from vllm.model_executor.parameter import ModelWeightParameter


class Behaviour(LinearMethodBase):
    """A linear method. `runtime` and `source` say whether those layouts must hold its state."""

    name: ClassVar[str]
    #: True: must round-trip. False: must be refused by name.
    auto: ClassVar[bool] = True
    runtime: ClassVar[bool] = True
    source: ClassVar[bool] = True

    def create_weights(
        self,
        layer: nn.Module,
        input_size_per_partition: int,
        output_partition_sizes: list[int],
        input_size: int,
        output_size: int,
        params_dtype: torch.dtype,
        **extra: Any,
    ) -> None:
        shape = (sum(output_partition_sizes), input_size_per_partition)
        weight = ModelWeightParameter(
            data=torch.empty(shape, dtype=params_dtype),
            input_dim=1,
            output_dim=0,
            weight_loader=extra["weight_loader"],
        )
        layer.register_parameter("weight", weight)

    def process_weights_after_loading(self, layer: nn.Module) -> None:
        self.repack(layer, layer.weight.data)

    def apply(
        self, layer: nn.Module, x: torch.Tensor, bias: torch.Tensor | None = None
    ) -> torch.Tensor:
        out = self.multiply(layer, x)
        return out if bias is None else out + bias

    def repack(self, layer: nn.Module, weight: torch.Tensor) -> None:
        """Turn the loaded `weight`, [output, input] in bf16, into what `multiply` reads."""
        raise NotImplementedError

    def multiply(self, layer: nn.Module, x: torch.Tensor) -> torch.Tensor:
        """x, [tokens, input], times what `repack` made."""
        raise NotImplementedError


def parameter(tensor: torch.Tensor) -> nn.Parameter:
    return nn.Parameter(tensor, requires_grad=False)


def register(behaviour: type[Behaviour]) -> None:
    """Make `quant_method: vss_<name>` mean `behaviour` for every linear but `lm_head`."""

    class Config(QuantizationConfig):
        def get_name(self) -> Any:
            return f"vss_{behaviour.name}"

        def get_supported_act_dtypes(self) -> list[torch.dtype]:
            return [torch.bfloat16]

        @classmethod
        def get_min_capability(cls) -> int:
            return -1

        @staticmethod
        def get_config_filenames() -> list[str]:
            return []

        @classmethod
        def from_config(cls, config: dict[str, Any]) -> "Config":
            return cls()

        def get_quant_method(self, layer: nn.Module, prefix: str) -> Any:
            if not isinstance(layer, LinearBase):
                return None
            return UnquantizedLinearMethod() if prefix.endswith("lm_head") else behaviour()

    register_quantization_config(f"vss_{behaviour.name}")(Config)
