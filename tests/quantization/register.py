"""Imported by a batch process (`Job.register`): registers every method of these tests with vLLM."""

import contextlib
import tempfile
from typing import Any

import torch
from torch import nn
from vllm.model_executor.layers.linear import LinearBase
from vllm.model_executor.layers.vocab_parallel_embedding import ParallelLMHead
from vllm.model_executor.model_loader import ShardedStateLoader
from vllm.model_executor.models import llama

from tests.quantization import (
    attention,
    attention_hidden,
    base,
    choices,
    experts,
    head,
    hidden,
    in_numpy,
    in_python,
    in_tensors,
    linked,
    loaders,
    scattered,
)
from tests.quantization.table import TABLE
from tests.zoo.mutations import MUTATIONS
from vllm_sharded_state.errors import ShardedStateError

assert {
    llama,
    attention,
    attention_hidden,
    choices,
    experts,
    head,
    hidden,
    in_numpy,
    in_python,
    in_tensors,
    linked,
    loaders,
    scattered,
}
_listed = {*TABLE, "scattered"}
assert base.METHODS.keys() == _listed, sorted(base.METHODS.keys() ^ _listed)
base.enter()


def reveal(model: nn.Module) -> None:
    """Show what only use shows: wide inputs to linears, and what attention kernels would read."""
    generator = torch.Generator().manual_seed(11)
    for module in model.modules():
        method: Any = getattr(module, "quant_method", None)
        if not isinstance(method, base.Plain):
            continue
        if isinstance(module, LinearBase | ParallelLMHead):
            head = isinstance(module, ParallelLMHead)
            columns = module.embedding_dim if head else module.input_size_per_partition
            x = torch.randn(300, columns, generator=generator).to(torch.bfloat16)
            module.revealed = method.apply(module, x)
    attention.reveal(model)


def try_to_save(model: nn.Module) -> None:
    """Save, in the layout of `VSS_LAYOUT`, whether or not that is refused, and throw it away."""
    with tempfile.TemporaryDirectory() as directory, contextlib.suppress(ShardedStateError):
        ShardedStateLoader.save_model(model, directory)


MUTATIONS["reveal_methods"] = reveal
MUTATIONS["try_to_save"] = try_to_save
