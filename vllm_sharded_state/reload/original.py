"""What the checkpoint that a model was started from fills, and what it leaves: read only where that
decides whether something is missing or unexpected.
"""

from collections.abc import Iterator
from typing import Any

import torch
from torch import nn
from vllm.logger import init_logger
from vllm.model_executor.model_loader import get_model_loader

from vllm_sharded_state import held
from vllm_sharded_state.state.recording import Recording
from vllm_sharded_state.state.twin import Twin, source_parameters

logger = init_logger("vllm.sharded_state.reload")


class Original:
    """The names that the model's own checkpoint holds, and what each of them fills.

    Nothing is read before it is asked for, and then no tensor's bytes but those of padded ones.
    """

    def __init__(self, vllm_config: Any, device: torch.device) -> None:
        self._config = vllm_config
        self._device = device
        self._read = False
        self._names: set[str] = set()
        self._recording: Recording | None = None
        self._parameters: dict[str, torch.Tensor] = {}
        self._fillers: dict[int, set[str]] = {}
        self._current = ""

    def missing(self, key: str, untouched: torch.Tensor, sent: set[str]) -> list[str]:
        """What should have been sent for `key`, of which the elements in `untouched` were not.

        Empty when the model's own checkpoint leaves these elements too: they are padding. Otherwise the
        names in that checkpoint that were not `sent`, or a count where there is no such checkpoint.
        """
        count = int(untouched.count_nonzero())
        counted = [f"{count} of {untouched.numel()} elements"]
        self._ensure_read()
        parameter = self._parameters.get(key)
        if self._recording is None or parameter is None:
            return counted
        _, never = self._recording.play_twice(parameter, self._device)
        if not bool((untouched & ~never).any()):
            return []
        return sorted(self._fillers.get(id(parameter), set()) - sent) or counted

    def unexpected(self, unplaced: list[str], twin: nn.Module) -> list[str]:
        """Those of the `unplaced` names that a cold load would not pass over as well.

        It passes over what the model's own checkpoint holds beyond the model, and over the second name
        of a tied tensor.
        """
        tied = dict(twin.named_parameters(remove_duplicate=False)).keys()
        names = [name for name in unplaced if name not in tied]
        if names:
            self._ensure_read()
        return sorted(name for name in names if name not in self._names)

    def _ensure_read(self) -> None:
        if self._read:
            return
        self._read = True
        if held.sharded_state(self._config.load_config, self._config.model_config) is not None:
            return  # of this rank's tensors under the model's own names, which are others
        loader: Any = get_model_loader(self._config.load_config)
        if not hasattr(loader, "get_all_weights"):
            return
        twin = Twin(self._config, self._device)
        self._recording = Recording(twin, self._watch)
        for unit in twin.units.values():
            self._parameters |= source_parameters(unit)
        try:
            self._recording.run(self._named(loader, twin.model))
        except Exception as error:  # noqa: BLE001 - a file may be gone, or hold anything by now
            logger.warning(
                "The model's own checkpoint can't be read again (%s: %s), so it can't tell padding "
                "from what is missing.",
                type(error).__name__,
                error,
            )
            self._recording = None

    def _named(self, loader: Any, model: nn.Module) -> Iterator[tuple[str, torch.Tensor]]:
        for name, tensor in loader.get_all_weights(self._config.model_config, model):
            self._names.add(name)
            self._current = name
            yield name, tensor

    def _watch(self, parameter: torch.Tensor, loaded: list[torch.Tensor]) -> None:
        self._fillers.setdefault(id(parameter), set()).add(self._current)
