"""What is sent, checked as it comes: names, shapes, dtypes and scales, before anything is changed."""

from collections.abc import Callable, Iterable, Iterator
from typing import Any

import torch

from vllm_sharded_state.errors import (
    ReloadMismatchError,
    ReloadSourceError,
    ReloadUnexpectedError,
)
from vllm_sharded_state.state.recording import Recording

from .kv import KvScales
from .validate import may_become, refuse_bad_scale


class Intake:
    """Passes tensors on to a model's `load_weights`, and knows what became of each.

    current: the name that is being loaded. sent: all names so far. unplaced: names for which no weight
    loader was called.
    """

    def __init__(self, keys: dict[int, str], scales: KvScales, whole: bool) -> None:
        """`keys` names the twin's parameters by id; `whole`: this rank holds all of every tensor."""
        self.current: str | None = None
        self.unplaced: list[str] = []
        self.count = 0
        self._keys = keys
        self._scales = scales
        self._whole = whole
        self.sent: set[str] = set()
        self._written: dict[int, int] = {}
        self._numel = 0

    def stream(
        self,
        weights: Iterable[tuple[str, torch.Tensor]],
        recording: Recording,
        between: Callable[[], None],
    ) -> Iterator[tuple[str, torch.Tensor]]:
        """Yield `weights`, calling `between` after each one that was loaded.

        Raises:
            ReloadSourceError: `weights` raised, or gave something else than names with tensors.
            ReloadUnexpectedError: a name came twice.
            ReloadMismatchError: a loader took only a part of a tensor, or repeated it to fill a place.
        """
        iterator = iter(weights)
        while True:
            try:
                name, tensor = next(iterator)
            except StopIteration:
                break
            except Exception as error:
                after = f"after {self.current}" if self.current else "before the first tensor"
                raise ReloadSourceError(
                    f"Reading the new weights failed {after} ({self.count} tensors): "
                    f"{type(error).__name__}: {error}"
                ) from error
            self.close(recording)
            between()
            if name in self.sent:
                raise ReloadUnexpectedError(f"{name} was sent twice.")
            self.sent.add(name)
            self.current, self._numel = name, tensor.numel()
            self.count += 1
            yield self._scales.rename(name), tensor
        self.close(recording)
        between()

    def watch(self, parameter: torch.Tensor, loaded: list[torch.Tensor]) -> None:
        """Check what a weight loader is about to load into `parameter`.

        Raises:
            ReloadMismatchError: a dtype that only a wrong checkpoint has there.
            ReloadScaleError: a scale that is not finite, or not positive.
        """
        recording = self._recording
        self._written.setdefault(id(parameter), recording.coverage[id(parameter)].written)
        key = self._keys[id(parameter)]
        for tensor in loaded:
            if not may_become(tensor.dtype, parameter.dtype):
                raise ReloadMismatchError(
                    f"{self.current} is {_name(tensor.dtype)}, and {key} takes "
                    f"{_name(parameter.dtype)}. Send it as the model's checkpoint has it."
                )
        if id(parameter) in self._scales.by_parameter:
            self._scales.accept(parameter, loaded, self.current or key)
        elif "scale" in key.rpartition(".")[2]:
            for tensor in loaded:
                refuse_bad_scale(tensor, self.current or key)

    @property
    def was_placed(self) -> bool:
        """Whether a weight loader was called for the current tensor."""
        return bool(self._written)

    def attach(self, recording: Recording) -> None:
        """Say which recording calls `watch`."""
        self._recording = recording

    def close(self, recording: Recording) -> None:
        """See what became of the tensor that was yielded last. Raises as `stream`."""
        if self.current is None:
            return
        if not self._written:
            self.unplaced.append(self.current)
        if recording.stretched:
            key = self._keys[id(recording.stretched[0])]
            raise ReloadMismatchError(f"{self.current} has too few elements to fill {key}.")
        used = sum(
            recording.coverage[parameter].written - before
            for parameter, before in self._written.items()
        )
        reduced = any(parameter in self._scales.by_parameter for parameter in self._written)
        if self._whole and not reduced and 0 < used < self._numel:
            keys = ", ".join(sorted(self._keys[parameter] for parameter in self._written))
            raise ReloadMismatchError(
                f"{self.current} has {self._numel} elements, of which {keys} takes {used}. "
                "Send it in the shape of the model's checkpoint."
            )
        self._written = {}


def _name(dtype: Any) -> str:
    return str(dtype).removeprefix("torch.")
