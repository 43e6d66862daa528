"""What of a model can change without its digest: each thing that the tests' own walk sees, in turn."""

from typing import Any

import torch

from tests.support import snapshot
from vllm_sharded_state.state.digest import state_digest

_FLOATS = tuple(f"_{kind}_scale_float" for kind in ("q", "k", "v", "prob"))


class _Tensors(snapshot.Walk):
    """Keeps the tensors themselves, by path."""

    def __init__(self) -> None:
        super().__init__()
        self.found: dict[str, torch.Tensor] = {}

    def _tensor(self, path: str, tensor: torch.Tensor) -> None:
        super()._tensor(path, tensor)
        self.found[path] = tensor


def blind_spots(model: Any, config: Any) -> dict[str, Any]:
    """`tried`: how many tensors and floats were changed, one at a time; `unseen`: those it missed."""
    walk = _Tensors()
    walk.model(model)
    before = state_digest(model, config)
    tried, unseen = 0, []

    def see(path: str) -> None:
        nonlocal tried
        tried += 1
        if state_digest(model, config)["state"] == before["state"]:
            unseen.append(path)

    for path, tensor in walk.found.items():
        if tensor.numel() and not tensor.is_meta:
            last = tensor.data.as_strided((1,), (1,), _last(tensor)).view(torch.uint8)[:1]
            last.bitwise_xor_(1)
            see(path)
            last.bitwise_xor_(1)
    for name, module in model.named_modules():
        for attribute in _FLOATS:
            value = getattr(module, attribute, None)
            if value is not None:
                setattr(module, attribute, value + 2**-20)
                see(f"{name}.{attribute}")
                setattr(module, attribute, value)
    assert state_digest(model, config) == before
    return {"tried": tried, "unseen": unseen}


def _last(tensor: torch.Tensor) -> int:
    """Where the last element lies in its storage."""
    steps = zip(tensor.shape, tensor.stride(), strict=True)
    return tensor.storage_offset() + sum((size - 1) * step for size, step in steps)
