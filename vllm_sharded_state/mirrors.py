"""Host mirrors of KV scales: Python floats and CPU tensors that repeat a device buffer.

Attention kernels read some of them and not the buffer (vllm/model_executor/layers/attention/
attention.py, `set_default_quant_scales`), so a pair that disagrees has no single right value to save.
"""

from collections.abc import Mapping

import torch
from torch import nn

from .errors import NotRepresentableError, RestoreError, listed
from .state.walk import Leaf

#: Mirror by buffer. `_prob_scale_float` is left out: upstream never sets it from a checkpoint.
_MIRRORS = {
    "_q_scale": ("_q_scale_float",),
    "_k_scale": ("_k_scale_float", "_k_scale_cpu"),
    "_v_scale": ("_v_scale_float", "_v_scale_cpu"),
}


def refuse_disagreement(leaves: Mapping[str, Leaf]) -> None:
    """Raise `NotRepresentableError` naming each mirror that does not repeat its buffer's maximum."""
    wrong: list[str] = []
    for path, leaf in leaves.items():
        owner, _, name = path.rpartition(".")
        if name in _MIRRORS and leaf.is_tensor:
            found = [leaves.get(f"{owner}.{m}".removeprefix(".")) for m in _MIRRORS[name]]
            mirrors = {mirror.path: mirror.value for mirror in found if mirror is not None}
            wrong += _different(path, leaf.value, mirrors)
    if wrong:
        raise NotRepresentableError(
            f"KV scales and their copies on the host disagree:\n{listed(wrong)}\n"
            "Set both to one value, and save again."
        )


def refuse_forged(modules: Mapping[str, nn.Module], directory: object) -> None:
    """Raise `RestoreError` naming each mirror of a loaded model that does not repeat its buffer.

    No save leaves such a pair: the manifest or a part was changed by someone who made checksums fit.
    """
    wrong: list[str] = []
    for owner, module in modules.items():
        for name, mirrors in _MIRRORS.items():
            buffer = getattr(module, name, None)
            if isinstance(buffer, torch.Tensor):
                found = {f"{owner}.{m}": getattr(module, m, None) for m in mirrors}
                wrong += _different(f"{owner}.{name}", buffer, found)
    if wrong:
        raise RestoreError(
            f"KV scales in {directory} and their copies on the host disagree:\n{listed(wrong)}\n"
            "It was changed after it was saved. Save the model again."
        )


def _different(path: str, buffer: torch.Tensor, mirrors: Mapping[str, object]) -> list[str]:
    """A line for each of `mirrors` (by path; None is none) that is not the maximum of `buffer`."""
    if buffer.numel() == 0:
        return []
    truth, lines = float(buffer.detach().max()), []
    for mirror, value in mirrors.items():
        if value is not None:
            shown = value
            if isinstance(value, torch.Tensor):
                shown = float(value.max()) if value.numel() else "empty"
            if shown != truth:
                lines.append(f"{mirror} is {shown!r}, {path} is {truth}")
    return lines
