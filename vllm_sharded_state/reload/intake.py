"""What is sent, checked as it comes: names, shapes, dtypes and scales, before anything is changed."""

import bisect
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import torch

from vllm_sharded_state.checkpoint.memory import span
from vllm_sharded_state.errors import (
    ReloadMismatchError,
    ReloadSourceError,
    ReloadUnexpectedError,
    shown,
)
from vllm_sharded_state.state.recording import Recording

from .kv import KvScales
from .memory import SenderMemory, refuse_formless, refuse_live
from .validate import may_become, refuse_bad_scale


class Intake:
    """Passes tensors on to a model's `load_weights`, and knows what became of each.

    current: the name that is being loaded, None outside of a stream. sent: all names so far. collects:
    whether the model loads tensors when all have come, rather than one by one.
    """

    def __init__(
        self,
        keys: dict[int, str],
        scales: KvScales,
        whole: bool,
        live: set[int],
        repeated: frozenset[str],
    ) -> None:
        """`keys` names the twin's parameters by id; `whole`: this rank holds all of every tensor.

        live: the addresses of the running model's own memory. repeated: second names of tensors, which
        are compared at the end rather than loaded.
        """
        self.current: str | None = None
        self.collects = False
        self._idle = _Idle()
        self._keys = keys
        self._scales = scales
        self._whole = whole
        self.sent: set[str] = set()
        self._live = live
        self._repeated = repeated
        self._loaded: dict[str, list[int]] = {}
        self._memory = SenderMemory(self._is_held)
        self._written: dict[int, int] = {}
        self._sending: torch.Tensor | None = None

    def stream(
        self,
        weights: Iterable[tuple[str, torch.Tensor]],
        between: Callable[[], None],
    ) -> Iterator[tuple[str, torch.Tensor]]:
        """Yield `weights`, calling `between` after each one that was loaded, before the next is drawn.

        Raises:
            ReloadSourceError: `weights` raised, or gave something else than names with tensors, or a
                tensor in memory that something else is still to be read from.
            ReloadUnexpectedError: a name came twice.
            ReloadMismatchError: a loader took only a part of a tensor, or repeated it to fill a place.
        """
        for name, tensor in read(weights, self._where):
            if name in self.sent:
                raise ReloadUnexpectedError(f"{shown(name)} was sent twice.")
            self.sent.add(name)
            refuse_live(shown(name), tensor, self._live)
            self._memory.take(name, tensor)
            if name in self._repeated:
                self._idle.add(name, tensor)
                continue
            self.current, self._sending = name, tensor
            yield self._scales.rename(name), tensor
            # Before the sender goes on, and perhaps uses the memory again.
            self._close()
            between()
        self.current = None

    def _where(self) -> str:
        after = f"after {self.current}" if self.current else "before the first tensor"
        return f" {after} ({len(self.sent)} tensors)"

    def own(self) -> None:
        """A call has ended: let go of the memory of its tensors, where others may lie next."""
        self._idle.own()
        self._memory.forget()
        self._written = {}  # by a model that collects tensors, after it had seen the last

    @property
    def unplaced(self) -> dict[str, torch.Tensor]:
        """What no weight loader was given yet, or not as it was sent, by name."""
        return dict(self._idle.tensors)

    def watch(self, parameter: torch.Tensor, loaded: list[torch.Tensor]) -> None:
        """Check what a weight loader is about to load into `parameter`.

        Raises:
            ReloadMismatchError: a dtype that only a wrong checkpoint has there.
            ReloadScaleError: a scale that is not finite, or not positive.
        """
        name = self.current if self._is_sending(loaded) else self._idle.take(loaded) or self.current
        if self.current is None:
            self.collects = True
        recording = self._recording
        self._written.setdefault(id(parameter), recording.coverage[id(parameter)].written)
        key = self._keys[id(parameter)]
        for tensor in loaded:
            if not may_become(tensor.dtype, parameter.dtype):
                raise ReloadMismatchError(
                    f"{name or 'A tensor'} is {_name(tensor.dtype)}, and {key} takes "
                    f"{_name(parameter.dtype)}. Send it as the model's checkpoint has it."
                )
        if id(parameter) in self._scales.by_parameter:
            self._scales.accept(parameter, loaded, name or key)
        elif "scale" in key.rpartition(".")[2]:
            for tensor in loaded:
                refuse_bad_scale(tensor.to(parameter.dtype), name or key)

    def _is_sending(self, loaded: list[torch.Tensor]) -> bool:
        """Whether one of `loaded` is the tensor that is being sent, or a view of it."""
        if self._sending is None:
            return False
        start, end = span(self._sending)
        return any(start <= tensor.data_ptr() < end for tensor in loaded)

    def _is_held(self, name: str) -> bool:
        """Whether what was sent as `name` is still to be read."""
        if name in self._idle.tensors:
            return True
        return any(self._recording.is_kept(parameter) for parameter in self._loaded.get(name, ()))

    @property
    def was_placed(self) -> bool:
        """Whether a weight loader was called for the current tensor."""
        return bool(self._written)

    def attach(self, recording: Recording) -> None:
        """Say which recording calls `watch`."""
        self._recording = recording

    def _close(self) -> None:
        """See what became of the tensor that was yielded last. Raises as `stream`."""
        if self.current is None or self._sending is None:
            return
        recording = self._recording
        if not self._written:
            self._idle.add(self.current, self._sending)
        self._loaded[self.current] = list(self._written)
        if recording.stretched:
            key = self._keys[id(recording.stretched[0])]
            raise ReloadMismatchError(f"{self.current} has too few elements to fill {key}.")
        used = sum(
            recording.coverage[parameter].written - before
            for parameter, before in self._written.items()
        )
        reduced = any(parameter in self._scales.by_parameter for parameter in self._written)
        if self._whole and not reduced and 0 < used < self._sending.numel():
            keys = ", ".join(sorted(self._keys[parameter] for parameter in self._written))
            raise ReloadMismatchError(
                f"{self.current} has {self._sending.numel()} elements, of which {keys} takes {used}. "
                "Send it in the shape of the model's checkpoint."
            )
        self._written, self._sending = {}, None


def read(
    weights: Iterable[tuple[str, torch.Tensor]], where: Callable[[], str] = str
) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield `weights`; `where` says in an error how far that came. Raises `ReloadSourceError`."""
    iterator = iter(weights)
    while True:
        try:
            name, tensor = next(iterator)
        except StopIteration:
            return
        except Exception as error:
            raise ReloadSourceError(
                f"Reading the new weights failed{where()}: {type(error).__name__}: {error}"
            ) from error
        refuse_formless(name, tensor)
        yield name, tensor


class _Idle:
    """Tensors that were passed on and not loaded at once: some models collect them first.

    Held, so that a weight loader that is given one later, or a view of it, is known by its address.
    """

    def __init__(self) -> None:
        self.tensors: dict[str, torch.Tensor] = {}
        self._spans: list[tuple[int, int, str]] = []
        self._owned: set[str] = set()

    def add(self, name: str, tensor: torch.Tensor) -> None:
        """Note that `tensor` was passed on as `name`, and no weight loader called."""
        self.tensors[name] = tensor
        if tensor.numel():
            bisect.insort(self._spans, (*span(tensor), name))

    def own(self) -> None:
        """Copy what is held: the memory that it lies in may be reused."""
        for name in self.tensors.keys() - self._owned:
            self.tensors[name] = self.tensors[name].detach().clone()
            self._owned.add(name)
        self._spans.clear()

    def take(self, loaded: list[torch.Tensor]) -> str | None:
        """The name under which what is `loaded` now was sent before, if it was."""
        for tensor in loaded if self._spans else ():
            if tensor.is_meta or not tensor.numel():
                continue
            place = bisect.bisect_right(self._spans, (tensor.data_ptr(), _END, "")) - 1
            if place >= 0 and tensor.data_ptr() < self._spans[place][1]:
                name = self._spans[place][2]
                self.tensors.pop(name, None)
                return name
        return None


#: Above every address.
_END = 1 << 64


def _name(dtype: Any) -> str:
    return str(dtype).removeprefix("torch.")
