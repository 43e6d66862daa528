"""Where every tensor of a loaded model lies: what captured graphs rely on."""

from typing import Any

from torch import nn

from tests.support.snapshot import Walk


class _Places(Walk):
    def _tensor(self, path: str, tensor: Any) -> None:
        if tensor.numel() and not tensor.is_meta:
            form = [list(tensor.shape), list(tensor.stride()), str(tensor.dtype)]
            self.tensors[path] = [tensor.data_ptr(), *form]
        else:
            self.tensors[path] = "meta" if tensor.is_meta else "empty"


def places(model: nn.Module) -> dict[str, Any]:
    """Address, shape, stride and dtype of each tensor that a snapshot sees, by path.

    Hidden ones too; `meta` and `empty` stand for those without memory. What native handles own is none:
    the tensors that hold a handle's address are left out, as it is another one after each reload.
    """
    walk = _Places()
    walk.model(model)
    return walk.tensors


def moved(before: dict[str, Any], after: dict[str, Any]) -> list[str]:
    """The paths at which something else lies now."""
    return sorted(k for k in before.keys() | after.keys() if before.get(k) != after.get(k))
