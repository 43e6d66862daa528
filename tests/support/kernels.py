"""Run the kernels of a loaded model on fixed random inputs, one module at a time.

What a native handle holds, or a copy that a closure captured, can't be read: it can only be used.
"""

import zlib
from collections.abc import Iterator

import torch
from torch import nn

ROWS = 5


def _input(name: str, columns: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(zlib.crc32(name.encode()))
    return torch.randn(ROWS, columns, generator=generator).to(torch.bfloat16)


def run_kernels(model: nn.Module) -> Iterator[tuple[str, torch.Tensor]]:
    """Name and output for each linear, embedding, head and expert layer that `model` has."""
    from vllm.config import VllmConfig, set_current_vllm_config
    from vllm.forward_context import set_forward_context

    config = VllmConfig()
    with torch.no_grad(), set_current_vllm_config(config), set_forward_context(None, config):
        for name, module in model.named_modules():
            for kind, output in _outputs(name, module):
                yield f"{name}:{kind}", output


def _outputs(name: str, module: nn.Module) -> Iterator[tuple[str, torch.Tensor]]:
    from vllm.model_executor.layers.fused_moe.routed_experts import RoutedExperts
    from vllm.model_executor.layers.linear import LinearBase
    from vllm.model_executor.layers.vocab_parallel_embedding import VocabParallelEmbedding

    if isinstance(module, LinearBase):
        columns = getattr(module, "input_size_per_partition", module.input_size)
        bias = getattr(module, "bias", None)
        yield "apply", module.quant_method.apply(module, _input(name, columns), bias)
    elif isinstance(module, VocabParallelEmbedding):
        rows = torch.arange(module.num_embeddings_per_partition)
        yield "embedding", module.quant_method.embedding(module, rows)
        # An embedding that no head is tied to has no matrix product set up on some backends.
        if hasattr(module, "cpu_linear"):
            yield "apply", module.quant_method.apply(module, _input(name, module.embedding_dim))
    elif isinstance(module, RoutedExperts):
        experts = module.global_num_experts
        ids = torch.stack([torch.arange(ROWS) % experts, (torch.arange(ROWS) + 1) % experts], 1)
        weights = torch.linspace(0.25, 0.75, ROWS).unsqueeze(1)
        yield (
            "apply",
            module.quant_method.apply(
                layer=module,
                x=_input(name, module.hidden_size),
                topk_weights=torch.cat([weights, 1 - weights], 1),
                topk_ids=ids.to(torch.int32),
                shared_experts=None,
                shared_experts_input=None,
            ),
        )
