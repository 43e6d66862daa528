"""A vLLM model of very many small tensors, to see what a tensor costs beside its bytes.

Modules of eight parameters (256 bytes each, bf16) and one buffer; in every tenth module, one of the
parameters is that of the module before, so that there is something to find stored already.
"""

import json
from pathlib import Path
from typing import Any

import torch
from torch import nn

ARCHITECTURE = "VssBenchmarkManyTensors"
PARAMETERS = 8
#: Tensors of one module, its buffer included.
PER_MODULE = PARAMETERS + 1


class Group(nn.Module):
    """Eight parameters and a buffer."""

    def __init__(self) -> None:
        super().__init__()
        for index in range(PARAMETERS):
            weight = nn.Parameter(torch.empty(16, 8, dtype=torch.bfloat16), requires_grad=False)
            self.register_parameter(f"weight_{index}", weight)
        self.register_buffer("scale", torch.ones(1, dtype=torch.float32))


class ManyTensors(nn.Module):
    """As much of a vLLM model as a loader needs; it computes nothing."""

    def __init__(self, *, vllm_config: Any, prefix: str = "") -> None:
        super().__init__()
        count = vllm_config.model_config.hf_config.benchmark_tensors // PER_MODULE
        self.groups = nn.ModuleList(Group() for _ in range(count))
        for number in range(9, count, 10):
            self.groups[number].weight_0 = self.groups[number - 1].weight_0

    def embed_input_ids(self, input_ids: torch.Tensor) -> torch.Tensor:
        raise NotImplementedError("this model is only loaded and saved")

    def forward(self, input_ids: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
        raise NotImplementedError("this model is only loaded and saved")

    def compute_logits(self, hidden_states: torch.Tensor) -> torch.Tensor:
        raise NotImplementedError("this model is only loaded and saved")

    def load_weights(self, weights: Any) -> set[str]:
        raise NotImplementedError("this model is loaded from sharded state, or filled by `dummy`")


def register() -> None:
    """Make vLLM know the architecture, in this process."""
    from vllm import ModelRegistry

    ModelRegistry.register_model(ARCHITECTURE, ManyTensors)


def write_config(directory: Path, tensors: int) -> Path:
    """Write the `config.json` of a model of about so many tensors, and return its directory."""
    directory.mkdir(parents=True, exist_ok=True)
    config = {
        "architectures": [ARCHITECTURE],
        "model_type": "llama",
        "hidden_size": 64,
        "intermediate_size": 64,
        "num_attention_heads": 1,
        "num_hidden_layers": 1,
        "vocab_size": 64,
        "max_position_embeddings": 128,
        "benchmark_tensors": tensors,
    }
    (directory / "config.json").write_text(json.dumps(config))
    return directory
