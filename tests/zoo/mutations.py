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


def keep_views(model: nn.Module) -> None:
    """As a first run may leave them: tensors that no load creates, some in a weight's memory."""
    norm = model.model.norm
    norm.part_of_weight = norm.weight.data[3:9]
    norm.even = norm.weight.data[::2]
    norm.own = torch.arange(24.0).view(4, 6)
    norm.own_columns = norm.own[:, 1:3]
    norm.own_again = norm.own
    norm.strided = torch.arange(24.0).view(4, 6).t()
    norm.repeated = torch.tensor([1.0, 2.0]).view(2, 1).expand(2, 5)


def change_viewed(model: nn.Module) -> None:
    """Change what the tensors of `keep_views` view, and see that they change with it."""
    norm = model.model.norm
    assert norm.strided.stride() == (1, 6)
    assert norm.strided.tolist() == torch.arange(24.0).view(4, 6).t().tolist()
    assert norm.repeated.stride() == (1, 0)
    assert norm.repeated.tolist() == [[1.0] * 5, [2.0] * 5]
    norm.weight.data.copy_(torch.arange(norm.weight.numel()))
    assert norm.part_of_weight.tolist() == list(range(3, 9))
    assert norm.even.tolist() == list(range(0, norm.weight.numel(), 2))
    norm.own.zero_()
    norm.own[2, 1] = 5
    assert norm.own_columns.tolist() == [[0, 0], [0, 0], [5, 0], [0, 0]]
    assert norm.own_again.tolist() == norm.own.tolist()


MUTATIONS = {
    "set_scales": set_scales,
    "rewrite_weights": rewrite_weights,
    "overwrite_source": overwrite_source,
    "keep_views": keep_views,
    "change_viewed": change_viewed,
}
