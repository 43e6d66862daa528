"""Host mirrors of KV scales: Python floats and CPU tensors that repeat a device buffer.

Attention kernels read some of them and not the buffer (vllm/model_executor/layers/attention/
attention.py, `set_default_quant_scales`), so a pair that disagrees has no single right value to save.
"""

from collections.abc import Mapping

import torch

from .errors import NotRepresentableError, listed
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
        if name not in _MIRRORS or not leaf.is_tensor or leaf.value.numel() == 0:
            continue
        truth = float(leaf.value.detach().max())
        for mirror_name in _MIRRORS[name]:
            mirror = leaves.get(f"{owner}.{mirror_name}".removeprefix("."))
            if mirror is None or mirror.value is None:
                continue
            value = mirror.value
            shown = float(value.max()) if isinstance(value, torch.Tensor) else value
            if shown != truth:
                wrong.append(f"{mirror.path} is {shown}, {path} is {truth}")
    if wrong:
        raise NotRepresentableError(
            f"KV scales and their copies on the host disagree:\n{listed(wrong)}\n"
            "Set both to one value, and save again."
        )
