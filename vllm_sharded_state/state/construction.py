"""What is known of a model from the moment it was built: its configuration and its small tensors.

Upstream builds a model, then fills and processes it. Elements that no checkpoint fills keep the value
that the constructor gave them (the sentinel of a KV scale, ones, zeros); once processed, they are
gone. So the small ones are kept, a few kilobytes a layer.
"""

from dataclasses import dataclass, field
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import nn

from .walk import join

#: Tensors up to this many elements are kept. Scales and zero points are; weights are not.
SMALL = 4096


@dataclass(frozen=True)
class Construction:
    """How a model was built.

    keys: every parameter and buffer it was built with, by `state_dict()` name.
    initial: the small ones' values, on the CPU.
    """

    vllm_config: Any
    keys: frozenset[str] = frozenset()
    initial: dict[str, torch.Tensor] = field(default_factory=dict)


_CONSTRUCTIONS: WeakKeyDictionary[nn.Module, Construction] = WeakKeyDictionary()


def remember(model: nn.Module, vllm_config: object) -> None:
    """Keep the configuration and small tensors of a model that was built but not yet filled."""
    tensors = {
        join(prefix, name): tensor
        for prefix, module in model.named_modules()
        for name, tensor in {**module._parameters, **module._buffers}.items()
        if tensor is not None
    }
    initial = {
        key: tensor.detach().to("cpu", copy=True)
        for key, tensor in tensors.items()
        if not tensor.is_meta and tensor.numel() <= SMALL
    }
    _CONSTRUCTIONS[model] = Construction(vllm_config, frozenset(tensors), initial)


def recall(model: nn.Module) -> Construction | None:
    """What `remember` kept for `model`, or None when it was built before the plugin was active."""
    return _CONSTRUCTIONS.get(model)
