"""Run a module's own kernel on a fixed input: the only way to compare what native code has packed.

Two modules that give bit-equal results on a dense random input hold the same weights, wherever they
hold them. Mixtures of experts and attention have no such entry point; what they hold is in tensors.
"""

from typing import Any

import torch
from torch import nn
from vllm.config import set_current_vllm_config
from vllm.model_executor.layers.linear import LinearBase
from vllm.model_executor.layers.vocab_parallel_embedding import VocabParallelEmbedding

#: Rows of the fixed input: enough for the kernels' vector paths, too few to cost memory.
ROWS = 4
#: Token ids looked up in an embedding, spread over its rows.
LOOKUPS = 64


def has_kernel(module: nn.Module) -> bool:
    """Whether `run` can run the kernel of `module`."""
    return isinstance(module, LinearBase | VocabParallelEmbedding)


def run(module: nn.Module, vllm_config: Any, device: torch.device) -> list[torch.Tensor]:
    """The results of `module`'s kernel for a fixed input; no collective is entered.

    A linear layer gives `[ROWS, output_size_per_partition]`, an embedding its logits
    `[ROWS, num_embeddings_per_partition]` and its rows `[LOOKUPS, embedding_dim]`, in the model's
    dtype. Raises whatever the kernel raises.
    """
    dtype = vllm_config.model_config.dtype
    method = getattr(module, "quant_method", None)
    assert method is not None
    with torch.no_grad(), set_current_vllm_config(vllm_config):
        if isinstance(module, LinearBase):
            width = getattr(module, "input_size_per_partition", module.input_size)
            x = _dense_input(width, dtype, device)
            bias = getattr(module, "bias", None)
            return [_first(method.apply(module, x, bias))]
        assert isinstance(module, VocabParallelEmbedding)
        x = _dense_input(module.embedding_dim, dtype, device)
        rows = module.num_embeddings_per_partition
        ids = torch.linspace(0, rows - 1, LOOKUPS, device=device).long()
        bias = getattr(module, "bias", None)
        return [_first(method.apply(module, x, bias)), method.embedding(module, ids)]


def bit_equal(a: list[torch.Tensor], b: list[torch.Tensor]) -> bool:
    """Whether two results agree in every bit (a NaN equals the same NaN)."""
    return len(a) == len(b) and all(same_bits(x, y) for x, y in zip(a, b, strict=True))


def same_bits(a: torch.Tensor, b: torch.Tensor) -> bool:
    """Whether two tensors have one shape, one dtype and the same bytes, whatever their strides."""
    if a.shape != b.shape or a.dtype != b.dtype:
        return False
    if a.numel() == 0:
        return True
    a, b = a.detach().contiguous(), b.detach().to(a.device).contiguous()
    return torch.equal(a.view(-1).view(torch.uint8), b.view(-1).view(torch.uint8))


def _dense_input(width: int, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    generator = torch.Generator().manual_seed(20240229)
    return torch.randn(ROWS, width, generator=generator).to(dtype).to(device)


def _first(result: Any) -> torch.Tensor:
    return result[0] if isinstance(result, tuple) else result
