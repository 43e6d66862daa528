"""Source tensors for an engine that was itself started from sharded state: they lie in its directory."""

import torch

from . import identity
from .checkpoint import manifest
from .errors import NoSourceError
from .filling import Filling
from .held import Held
from .state import plain
from .state.twin import Twin, source_parameters


class SavedSource:
    """Reads the source tensors of units from the sharded state that an engine was given.

    Raises `NoSourceError` when the directory has no manifest, or holds a unit in runtime layout only.
    """

    def __init__(self, twin: Twin, held: Held | None) -> None:
        """`held` is what `twin`'s configuration names; None where it has no manifest."""
        if held is None:
            raise NoSourceError(
                f"{twin.vllm_config.model_config.model} has no {manifest.FILE_NAME}, so it does not tell "
                "what its tensors were before they were processed.\nSave from the model's own checkpoint "
                "instead."
            )
        self._twin = twin
        self._directory = held.location
        self._entry = held.manifest.rank(identity.rank())
        self._reader = self._directory.open(self._entry.files, held.manifest.save_id)
        self._places = {
            path: tensor
            for key, tensor in self._entry.tensors.items()
            if tensor.stage == "source"
            for path in (key, *tensor.aliases)
        }

        modules = {name for unit in twin.units.values() for name in unit.modules}
        self._before: dict[str, dict[str, object]] = {}
        for key, entry in self._entry.values.items():
            if entry.stage == "source":
                path = key.removesuffix(manifest.AGAIN)
                owner = _owner(path, modules)
                self._before.setdefault(owner, {})[path] = plain.decode(entry.value)

    def side_effects(self, unit: str) -> dict[str, object]:
        """Values that weight loaders had set on the modules of `unit` before it was processed."""
        return {
            path: value
            for module in self._twin.units[unit].modules
            for path, value in self._before.get(module, {}).items()
        }

    def read(self, unit: str, device: torch.device) -> tuple[dict[str, torch.Tensor], list[str]]:
        """The source tensors of `unit` by key, on `device`; nothing in a saved unit is incomplete."""
        places = {}
        for key in source_parameters(self._twin.units[unit]):
            place = self._places.get(key)
            if place is None:
                raise NoSourceError(
                    f"{unit} can't be saved in source layout: {self._directory} holds it in runtime "
                    "layout, and there is no way back.\nSave it with layout=auto or runtime, or "
                    "start the engine from the model's own checkpoint."
                )
            places[key] = (place.file, place.key, place.checksum)
        return Filling(self._reader, places.__getitem__).fetch(places, device), []


def _owner(path: str, modules: set[str]) -> str:
    """The innermost of `modules` that the value at `path` belongs to; the root has the empty name."""
    while path and path not in modules:
        path = path.rpartition(".")[0]
    return path
