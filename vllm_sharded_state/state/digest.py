"""A digest over all that a model on this rank computes with: equal state, equal digest.

It covers every tensor that the walk finds (parameters, buffers, hidden tensors, host mirrors) by path,
dtype, shape and bytes, and every Python number. What native code holds can't be read: for it stands what
the module's own kernel makes of a fixed input. Names of classes, strings and numbers that may be
addresses stay out: they may differ between processes that compute the same.
"""

import enum
from typing import Any

import numpy as np
import torch
from torch import nn

from vllm_sharded_state.checkpoint.digest import Digest, tensor_checksum

from . import boundaries, kernels, plain, units
from .compare import place
from .process import load_device
from .units import Unit
from .walk import Kind, Leaf


def state_digest(model: nn.Module, vllm_config: Any) -> dict[str, str | list[str]]:
    """`state`: the digest of `model`; `uncovered`: paths of native memory that no kernel shows.

    Reads all of the model, on the host in place and from a device through one small buffer; runs the
    kernel of each layer with native memory on 325 rows. Such layers give equal digests on equal
    machines with equally many threads only.
    """
    device = load_device(vllm_config)
    digest = Digest()
    checksums: dict[tuple[object, ...], str] = {}  # one for tensors that are views of one memory
    uncovered: list[str] = []
    for unit, leaves in units.all_leaves(model):
        for path, leaf in leaves.items():
            if leaf.kind is Kind.OPAQUE:
                continue
            if leaf.is_tensor:
                digest.note_tensor(path, leaf.value, _content(leaf.value, checksums))
            elif _is_number(leaf.value):
                digest.note(path, plain.encode(_python(leaf.value)))
        uncovered += _note_native(unit, leaves, digest, vllm_config, device)
    return {"state": digest.hexdigest(), "uncovered": sorted(uncovered)}


def _content(tensor: torch.Tensor, checksums: dict[tuple[object, ...], str]) -> str:
    if tensor.is_meta:
        return "meta"
    key = place(tensor)
    if key not in checksums:
        checksums[key] = tensor_checksum(tensor)
    return checksums[key]


def _is_number(value: object) -> bool:
    if isinstance(value, enum.Enum) or plain.is_address_like(value):
        return False
    return isinstance(value, bool | int | float | np.number)


def _python(value: Any) -> bool | int | float:
    number: bool | int | float = value.item() if isinstance(value, np.number) else value
    return number


def _note_native(
    unit: Unit, leaves: dict[str, Leaf], digest: Digest, vllm_config: Any, device: torch.device
) -> list[str]:
    """Note what the kernels of `unit` compute, if native code holds weights of it; else where it does."""
    native = [
        leaf.path
        for leaf in leaves.values()
        if leaf.kind is Kind.OPAQUE and boundaries.holds_weights(leaf.value)
    ]
    if not native:
        return []
    results = kernels.results(unit.modules, vllm_config, device)
    if not results or None in results.values():
        return native
    for name, result in results.items():
        digest.note(f"{name}:kernel", result)
    return []
