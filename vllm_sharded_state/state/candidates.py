"""Source tensors to be had without reading the checkpoint again; whether they are right is tried out."""

from collections.abc import Iterator, Mapping

import torch
from vllm.model_executor.layers.quantization.kv_cache import BaseKVCacheMethod

from .compare import same_form
from .units import Unit
from .walk import Leaf

#: What upstream's KV-cache methods create (quantization/kv_cache.py, compressed_tensors.py).
KV_PARAMETERS = frozenset(
    {"q_scale", "k_scale", "v_scale", "prob_scale", "q_zero_point", "k_zero_point", "v_zero_point"}
)


def at_hand(
    unit: Unit,
    declared: Mapping[str, torch.Tensor],
    live: Mapping[str, Leaf],
    initial: Mapping[str, torch.Tensor],
) -> Iterator[dict[str, torch.Tensor]]:
    """Source tensors by key that may be those of `unit`: all that it `declared`, the likeliest first."""
    for found in (_unchanged(declared, live), _kv_scales(unit, declared, live, initial)):
        if found is not None:
            yield found


def _unchanged(
    declared: Mapping[str, torch.Tensor], live: Mapping[str, Leaf]
) -> dict[str, torch.Tensor] | None:
    """The live tensors, where each tensor that was `declared` still is there in its form; else None."""
    found: dict[str, torch.Tensor] = {}
    for key, meta in declared.items():
        leaf = live.get(key)
        if leaf is None or not leaf.is_tensor or not same_form(leaf.value, meta):
            return None
        found[key] = leaf.value
    return found


def _kv_scales(
    unit: Unit,
    declared: Mapping[str, torch.Tensor],
    live: Mapping[str, Leaf],
    initial: Mapping[str, torch.Tensor],
) -> dict[str, torch.Tensor] | None:
    """For KV-cache methods: the scale parameters, from the `_*_scale` buffers made of them; else None.

    `initial` has the constructor's values, which are right for what nothing has set.
    """
    if not isinstance(getattr(unit.root, "quant_method", None), BaseKVCacheMethod):
        return None
    found: dict[str, torch.Tensor] = {}
    for key, meta in declared.items():
        owner, _, name = key.rpartition(".")
        for path in (key, f"{owner}._{name}".removeprefix(".")):
            leaf = live.get(path)
            if leaf is not None and leaf.is_tensor and leaf.value.numel() == meta.numel():
                found[key] = leaf.value.detach().to(meta.dtype).reshape(meta.shape)
        if key not in found:
            if name not in KV_PARAMETERS or key not in initial:
                return None
            found[key] = initial[key].to(meta.dtype)
    return found
