"""Models of our own that compute a tensor from several layers' weights, as some of vLLM's do."""

from collections.abc import Iterable
from typing import Any

import torch
from vllm import ModelRegistry
from vllm.model_executor.models.llama import LlamaForCausalLM


def _product(model: Any) -> torch.Tensor:
    first, second = (layer.input_layernorm.weight.detach() for layer in model.model.layers)
    return first * second


class LlamaWithHook(LlamaForCausalLM):
    """Computes it in the hook that vLLM calls once a model has been loaded and processed."""

    def process_weights_after_loading(self) -> None:
        self.product = _product(self)


class LlamaThatComputes(LlamaForCausalLM):
    """Computes it when it has loaded all weights."""

    def load_weights(self, weights: Iterable[tuple[str, torch.Tensor]]) -> set[str]:
        loaded: set[str] = super().load_weights(weights)
        self.product = _product(self)
        return loaded


for _model in (LlamaWithHook, LlamaThatComputes):
    ModelRegistry.register_model(_model.__name__, _model)
