"""Put the Python values of a manifest back into a model, before it is processed and after."""

from collections.abc import Mapping, Set

from torch import nn

from .checkpoint.manifest import AGAIN, ValueEntry
from .errors import RestoreError, listed
from .state import plain
from .state.walk import Leaf


class Values:
    """The values of one rank, by path, for each stage."""

    def __init__(self, entries: Mapping[str, ValueEntry]) -> None:
        self._by_stage: dict[str, dict[str, ValueEntry]] = {"source": {}, "runtime": {}}
        for name, entry in entries.items():
            self._by_stage[entry.stage][name.removesuffix(AGAIN)] = entry

    def set(self, leaves: Mapping[str, Leaf], stage: str) -> None:
        """Set the values of `stage` that have a place among `leaves`. Raises `RestoreError`."""
        saved = self._by_stage[stage]
        for path in [path for path in leaves if path in saved]:
            leaf, value = leaves[path], plain.decode(saved[path].value)
            if leaf.assign is not None:
                leaf.assign(value)
            elif not plain.equal(leaf.value, value):
                raise RestoreError(
                    f"{path} should be {value!r}, is {leaf.value!r}, and lies where it can't be "
                    "replaced. Save the model again with this version of vLLM."
                )

    def add(self, modules: Mapping[str, nn.Module], seen: Set[str]) -> None:
        """Set the values of attributes that no load creates; none may be left without a place.

        `seen` are the paths that had a place. Raises `RestoreError`.
        """
        lost = []
        for path, entry in self._by_stage["runtime"].items():
            if path in seen:
                continue
            if entry.owner is None or entry.owner not in modules:
                lost.append(path)
            else:
                attribute = path.removeprefix(entry.owner).removeprefix(".")
                setattr(modules[entry.owner], attribute, plain.decode(entry.value))
        if lost:
            raise RestoreError(
                f"Values that were saved have no place in the model:\n{listed(lost)}\n"
                "Save the model again with this version of vLLM."
            )
