"""Read the source tensors of single modules from the model's own checkpoint again.

The model's `load_weights` runs once on a twin on the meta device (`recording.py`), with the checkpoint's
tensors as views of memory-mapped files, so that nothing is copied. Then what belongs to one module is
played again on real memory, a module at a time. What loaders do on the side is recorded too.
"""

from typing import Any

import torch
from vllm.logger import init_logger
from vllm.model_executor.model_loader import get_model_loader

from vllm_sharded_state.errors import NoSourceError

from . import plain
from .recording import Recording
from .twin import Twin, source_parameters
from .units import Unit
from .walk import Kind

logger = init_logger("vllm.sharded_state.source")


class SourceReader:
    """The source tensors of a model, module by module, from the checkpoint it was loaded from.

    Raises `NoSourceError` when the load format has no checkpoint, or the model's own `load_weights`
    cannot run on a twin.
    """

    def __init__(self, twin: Twin, initial: dict[str, torch.Tensor]) -> None:
        self._twin = twin
        self._initial = initial
        self._recording = Recording(twin)
        before = {name: _plain_values(twin, unit) for name, unit in twin.units.items()}
        self._record()
        self._side_effects = {
            name: {
                path: value
                for path, value in _plain_values(twin, unit).items()
                if not plain.equal(value, before[name].get(path))
            }
            for name, unit in twin.units.items()
        }

    def side_effects(self, unit: str) -> dict[str, object]:
        """Python values, by path, that the weight loaders set on the modules of `unit`."""
        return self._side_effects[unit]

    def read(self, unit: str, device: torch.device) -> tuple[dict[str, torch.Tensor], list[str]]:
        """The source tensors of `unit` by `state_dict()` key, on `device`, filled by its loaders.

        Also returns the keys of which some elements came from neither checkpoint nor constructor;
        those elements are zero.
        """
        tensors: dict[str, torch.Tensor] = {}
        incomplete: list[str] = []
        for key, parameter in source_parameters(self._twin.units[unit]).items():
            if id(parameter) in self._recording.lost:
                raise NoSourceError(
                    f"{key} is computed from other weights by the model itself, while it loads.\n"
                    "Save it in runtime layout: VSS_LAYOUT=runtime."
                )
            filled, untouched = self._recording.play_twice(parameter, device)
            if bool(untouched.any()):
                initial = self._initial.get(key)
                if initial is not None and initial.shape == filled.shape:
                    filled.view(-1)[untouched.view(-1)] = initial.to(device, filled.dtype).view(-1)[
                        untouched.view(-1)
                    ]
                else:
                    incomplete.append(key)
            tensors[key] = filled
        return tensors, incomplete

    def _record(self) -> None:
        """Run the model's `load_weights` on the twin with the tensors of its checkpoint."""
        config = self._twin.vllm_config
        loader: Any = get_model_loader(config.load_config)
        if not hasattr(loader, "get_all_weights"):
            raise NoSourceError(
                f"load format {config.load_config.load_format!r} has no checkpoint to read again, "
                "and weights were packed away when the model was loaded.\n"
                "Start the engine from the model's checkpoint, and save from there."
            )
        self._recording.run(loader.get_all_weights(config.model_config, self._twin.model))


def _plain_values(twin: Twin, unit: Unit) -> dict[str, object]:
    return {
        path: leaf.value
        for path, leaf in twin.leaves(unit).items()
        if leaf.kind is Kind.VALUE and plain.is_restorable(leaf.value)
    }
