"""The Python values of a rank's entry: read before the model is built, put where they were.

A manifest may be forged, so what it names has to be there, and to be a place for such a thing: no value
takes the place of a method, a module or a tensor.
"""

from collections.abc import Mapping, Set

from torch import nn

from .checkpoint.manifest import AGAIN, FILE_NAME, ValueEntry
from .errors import ManifestError, RestoreError, listed
from .state import plain
from .state.walk import Leaf, join


class Values:
    """Values by path, decoded.

    Raises `ManifestError` for one that is nothing `state.plain` writes.
    """

    def __init__(self, directory: object, entries: Mapping[str, ValueEntry]) -> None:
        self._directory = directory
        self._entries = entries
        self._decoded: dict[str, object] = {}
        self._by_stage: dict[str, dict[str, object]] = {}
        for name, entry in entries.items():
            try:
                value = self._decoded[name] = plain.decode(entry.value)
            except (ValueError, OverflowError, RecursionError) as error:
                raise ManifestError(
                    f"{FILE_NAME} in {directory}: the value of {name} can't have been saved ({error}).\n"
                    "Save the model again."
                ) from error
            self._by_stage.setdefault(entry.stage, {})[name.removesuffix(AGAIN)] = value

    def of(self, stage: str) -> Mapping[str, object]:
        """Those of `stage`, by path."""
        return self._by_stage.get(stage, {})

    def put(self, leaves: Mapping[str, Leaf], stage: str) -> None:
        """Set those of `stage` that have their place among `leaves`. Raises `RestoreError`."""
        saved = self.of(stage)
        for path in leaves.keys() & saved.keys() if saved else ():
            leaf, value = leaves[path], saved[path]
            if leaf.is_tensor and value is not None:
                raise self._lost([f"{path} is a tensor here, {value!r} was saved"])
            if leaf.assign is not None:
                leaf.assign(value)
            elif not plain.equal(leaf.value, value):
                raise RestoreError(
                    f"{path} should be {value!r}, is {leaf.value!r}, and lies where it can't be "
                    "replaced. Save the model again with this version of vLLM."
                )

    def add(self, modules: Mapping[str, nn.Module], seen: Set[str]) -> None:
        """Set the attributes that no load creates. Raises `RestoreError` where one has no place."""
        lost = []
        for name, entry in self._entries.items():
            path = name.removesuffix(AGAIN)
            if entry.stage == "source" or path in seen:
                continue
            place = vacancy(modules, path, entry.owner)
            if place is None:
                lost.append(path)
            else:
                setattr(*place, self._decoded[name])
        if lost:
            raise self._lost(lost)

    def _lost(self, lines: list[str]) -> RestoreError:
        return RestoreError(
            f"Values that were saved in {self._directory} have no place in the model:\n{listed(lines)}\n"
            "Save the model again with this version of vLLM."
        )


def vacancy(
    modules: Mapping[str, nn.Module], path: str, owner: str | None
) -> tuple[nn.Module, str] | None:
    """The module and the attribute for what lies at `path` and no load creates; else None.

    `owner` names the module, as the manifest has it. The attribute has to be missing, or None, or a
    number or string that the class has for those that don't set it.
    """
    module = None if owner is None else modules.get(owner)
    if owner is None or module is None:
        return None
    name = path.removeprefix(owner).removeprefix(".")
    if join(owner, name) != path or not name.isidentifier():
        return None
    if vars(module).get(name) is not None:
        return None
    return (module, name) if plain.is_restorable(getattr(module, name, None)) else None
