"""Memory that new native handles read and do not own.

A handle may keep the bare address of a tensor that it was made with (oneDNN's int8 product keeps that of
the weight's scales). That tensor belongs to the unit that was built beside the live one; when it goes,
the handle reads whatever takes its place. So such tensors stay as long as the handle does. Whether a
large one is read at all is tried out: it is overwritten, and the live kernel runs before and after.
"""

from collections.abc import Mapping
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import nn

from vllm_sharded_state.state import kernels
from vllm_sharded_state.state.unit_state import method_name
from vllm_sharded_state.state.units import Unit
from vllm_sharded_state.state.walk import Leaf

from .placing import Placing
from .undo import UndoLog

#: What the handles of a module read, by module.
_alive: "WeakKeyDictionary[nn.Module, list[torch.Tensor]]" = WeakKeyDictionary()

#: Tensors of up to so many bytes are kept without asking.
_SMALL_BYTES = 1 << 16


class Handles:
    """Keeps what the handles of units read, in a reload of one model on one device."""

    def __init__(self, vllm_config: Any, device: torch.device) -> None:
        self._config = vllm_config
        self._device = device
        self._is_read: dict[tuple[str | None, str], bool] = {}

    def keep_alive(
        self, live: Unit, built: Mapping[str, Leaf], placing: Placing, undo: UndoLog
    ) -> None:
        """Keep the tensors of `built` that `live`, which took its handles over, may read."""
        kept = []
        for path, leaf in built.items():
            if leaf.is_tensor and leaf.value.numel() and not leaf.value.is_meta:
                kind = (method_name(live.root), path.removeprefix(live.name))
                if leaf.value.nbytes <= _SMALL_BYTES or self._reads(live, kind, leaf.value):
                    kept.append(leaf.value)
        root = live.root

        def assign(tensors: list[torch.Tensor] | None) -> None:
            if tensors is None:
                _alive.pop(root, None)
            else:
                _alive[root] = tensors

        undo.keep_value(assign, _alive.get(root))
        assign(kept)

    def _reads(self, live: Unit, kind: tuple[str | None, str], tensor: torch.Tensor) -> bool:
        """Whether the live kernels read `tensor`, which is no tensor of theirs; True if unknown."""
        if kind not in self._is_read:
            self._is_read[kind] = self._try(live, tensor)
        return self._is_read[kind]

    def _try(self, live: Unit, tensor: torch.Tensor) -> bool:
        before = kernels.results(live.modules, self._config, self._device)
        if not before or None in before.values():
            return True
        old = tensor.detach().clone()
        raw = tensor.detach().view(-1).view(torch.uint8) if tensor.is_contiguous() else None
        if raw is None:
            return True
        raw.bitwise_not_()
        after = kernels.results(live.modules, self._config, self._device)
        tensor.data.copy_(old)
        return before != after
