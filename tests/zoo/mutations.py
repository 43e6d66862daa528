"""Changes made to a loaded model by hand, as a user or a trainer would."""

import os
import shutil
from pathlib import Path

import torch
from torch import nn

from tests.zoo.checkpoint import Scales


def set_scales(model: nn.Module) -> None:
    """Calibrated KV scales on a model whose checkpoint has none: tensor, float and CPU copy agree."""
    scales = Scales(first=5, step=2)
    for _, module in sorted(model.named_modules()):
        if not isinstance(getattr(module, "_k_scale", None), torch.Tensor):
            continue
        for kind in ("q", "k", "v", "prob"):
            value = scales.take().item()
            getattr(module, f"_{kind}_scale").fill_(value)
            setattr(module, f"_{kind}_scale_float", value)
            if kind in ("k", "v"):
                getattr(module, f"_{kind}_scale_cpu").fill_(value)


def rewrite_weights(model: nn.Module) -> None:
    """A trainer's update: every parameter that is still a tensor moves, in place."""
    generator = torch.Generator().manual_seed(7)
    for _, parameter in sorted(model.named_parameters()):
        if parameter.numel() and parameter.dtype == torch.bfloat16:
            step = torch.randn(parameter.shape, generator=generator) * 0.05
            parameter.data.add_(step.to(torch.bfloat16))


def overwrite_source(model: nn.Module) -> None:
    """Somebody puts other weights where the model was loaded from. The model itself stays."""
    target, other = os.environ["VSS_TEST_OVERWRITE"].split(":")
    for path in Path(other).glob("*.safetensors"):
        shutil.copy(path, Path(target) / path.name)


MUTATIONS = {
    "set_scales": set_scales,
    "rewrite_weights": rewrite_weights,
    "overwrite_source": overwrite_source,
}
