"""The checkpoint that a running model is updated to: other weights and scales in the same form."""

import torch

from tests.zoo.checkpoint import Checkpoint


def updated(checkpoint: Checkpoint) -> Checkpoint:
    """Every weight moves. Scales are doubled: what bf16 holds exactly, it still does."""
    generator = torch.Generator().manual_seed(3)
    tensors = {}
    for name, old in checkpoint.tensors.items():
        last = name.rpartition(".")[2]
        if "scale" in last:
            tensors[name] = old * 2
        elif old.dtype == torch.bfloat16:
            step = torch.randn(old.shape, generator=generator) * 0.02
            tensors[name] = (old.float() * 1.25 + step).to(old.dtype)
        elif old.dim() > 1:
            tensors[name] = old.flip(0).contiguous()  # quantized: other values of the same kind
        else:
            tensors[name] = old
    return Checkpoint(checkpoint.config, tensors, checkpoint.files)
