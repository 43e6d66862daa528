"""Methods of the head. As vLLM's own quantized heads, they can't look up embeddings."""

from typing import Any

import torch

from tests.quantization.base import HEAD_METHODS, METHODS, Packing, Plain, frozen
from tests.quantization.hidden import ById
from tests.quantization.in_tensors import Attribute


class _OfHead(Packing):
    """A head has no gains in the checkpoint."""

    def create_weights(self, layer: Any, *args: Any, **kwargs: Any) -> None:
        super().create_weights(layer, *args, **kwargs)
        del layer.gain

    def process(self, layer: Any) -> None:
        layer.gain = frozen(torch.ones(1))
        super().process(layer)


class HeadPacked(_OfHead, Attribute):
    """Packed, in plain attributes."""


class HeadById(_OfHead, ById):
    """Packed, and kept out of sight."""


for _name, _cls in {"head_packed": HeadPacked, "head_by_id": HeadById}.items():
    HEAD_METHODS[_name] = _cls
    METHODS[_name] = Plain
