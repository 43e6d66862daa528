"""Run upstream's own `process_weights_after_loading` on one unit."""

from typing import Any

import torch
from torch import nn
from vllm.config import set_current_vllm_config
from vllm.model_executor.model_loader.utils import process_weights_after_loading
from vllm.utils.torch_utils import set_default_torch_dtype

from .units import Unit


class _Holder(nn.Module):
    """A parent for one unit: upstream's function takes a model and looks at the modules below it."""

    def __init__(self, root: nn.Module) -> None:
        super().__init__()
        self.unit = root


def load_device(vllm_config: Any) -> torch.device:
    """Where the weights of a model lie, as upstream decides it (`BaseModelLoader.load_model`)."""
    return torch.device(vllm_config.load_config.device or vllm_config.device_config.device)


def process(unit: Unit, vllm_config: Any, device: torch.device) -> None:
    """Bring a filled unit from source to runtime layout, as upstream does for a whole model."""
    if not unit.processed:
        return
    model_config = vllm_config.model_config
    with (
        torch.no_grad(),
        set_current_vllm_config(vllm_config),
        set_default_torch_dtype(model_config.dtype),
    ):
        process_weights_after_loading(_Holder(unit.root), model_config, device)
