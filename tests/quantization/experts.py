"""Methods of fused experts: vLLM's own unquantized one, with a factor that it takes from the weights."""

from typing import Any

import torch
from vllm.model_executor.layers.fused_moe.unquantized_fused_moe_method import (
    UnquantizedFusedMoEMethod,
)
from vllm.model_executor.layers.linear import UnquantizedLinearMethod

from tests.quantization.base import EXPERTS_METHODS, METHODS


class Scaled(UnquantizedFusedMoEMethod):
    """The factor is an attribute of the layer."""

    def process_weights_after_loading(self, layer: Any) -> None:
        factor = 1 + float(layer.w13_weight.data.float().abs().max())
        super().process_weights_after_loading(layer)
        self.put(layer, factor)

    def apply(self, layer: Any, x: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        return super().apply(layer, x, *args, **kwargs) * self.got(layer)

    def put(self, layer: Any, factor: float) -> None:
        layer.factor = factor

    def got(self, layer: Any) -> float:
        return layer.factor


class ById(Scaled):
    """It lies in a registry of the process; all that can be seen keeps its form."""

    kept: dict[int, float] = {}  # noqa: RUF012

    def put(self, layer: Any, factor: float) -> None:
        self.kept[id(layer)] = factor

    def got(self, layer: Any) -> float:
        return self.kept[id(layer)]


class ByName(ById):
    """The same, where a second model takes the first one's place."""

    def put(self, layer: Any, factor: float) -> None:
        self.kept[layer.layer_name] = factor

    def got(self, layer: Any) -> float:
        return self.kept[layer.layer_name]


for _name, _cls in {
    "experts_number": Scaled,
    "experts_by_id": ById,
    "experts_by_name": ByName,
}.items():
    EXPERTS_METHODS[_name] = _cls
    METHODS[_name] = lambda config, prefix: UnquantizedLinearMethod()
