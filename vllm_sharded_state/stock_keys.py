"""The keys under which stock vLLM looks for tensors that a model shows under several names."""

from collections.abc import Iterable
from typing import Any

from torch import nn

from .state import units
from .state.compare import place
from .state.walk import Leaf, join


class StockKeys:
    """The key that stock's loader looks for, where `state_dict()` shows one tensor under several.

    `ShardedStateLoader._filter_subtensors` keeps the first in alphabetical order, so that is where
    stock stores tied word embeddings (vllm/config/vllm.py says so).
    """

    def __init__(self, model: nn.Module, leaves: Iterable[Leaf]) -> None:
        self._names = units.all_names(model)
        self._shared: dict[str, list[str]] = {}
        groups: dict[tuple[Any, ...], list[str]] = {}
        for leaf in leaves:
            if leaf.in_state_dict and leaf.value.numel():
                group = groups.setdefault(place(leaf.value), [])
                group.append(leaf.path)
                self._shared[leaf.path] = group

    def key(self, path: str) -> str:
        """The first of all keys for the tensor at `path`."""
        keys = []
        for same in self._shared.get(path, [path]):
            owner, _, name = same.rpartition(".")
            keys += [join(module, name) for module in self._names.get(owner, [owner])]
        return min(keys)
