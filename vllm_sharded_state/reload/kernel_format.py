"""New weights that are in the running model's own format already: copied in place, buffers too."""

import time
from collections.abc import Iterable
from typing import Any, NoReturn

import torch
from torch import nn

from vllm_sharded_state.errors import (
    ReloadError,
    ReloadInPlaceError,
    ReloadMismatchError,
    ReloadUnexpectedError,
)
from vllm_sharded_state.state import boundaries, units
from vllm_sharded_state.state.compare import describe
from vllm_sharded_state.state.kernels import same_bits
from vllm_sharded_state.state.kv_scales import KINDS, KINDS_WITH_HOST_TENSOR
from vllm_sharded_state.state.units import Unit
from vllm_sharded_state.state.walk import Kind, Leaf

from . import lost
from .intake import read
from .report import Report
from .undo import UndoLog, require_room
from .validate import refuse_bad_values

_SCALES = {f"_{kind}_scale": kind for kind in KINDS}


class KernelFormat:
    """Tensors by the names that `state_dict()` shows, in the shape and dtype that they have there.

    Every one is copied in place and can be taken back, as in `Transaction`; `atomic` means the same.
    """

    def __init__(self, model: nn.Module, vllm_config: Any, atomic: str = "model") -> None:
        self._began = time.perf_counter()
        self._model = model
        self._atomic = atomic
        self._undo = UndoLog()
        self._sent: set[str] = set()
        self._places: dict[str, tuple[Unit, Leaf]] = {}
        self._opaque: dict[str, str] = {}
        for unit, leaves in units.all_leaves(model):
            for path, leaf in leaves.items():
                if leaf.is_tensor and leaf.attribute is not None:
                    self._places[path] = (unit, leaf)
                if (
                    leaf.kind is Kind.OPAQUE
                    and unit.processed
                    and boundaries.holds_weights(leaf.value)
                ):
                    self._opaque[unit.name] = path
        sizes: dict[str, int] = {}
        for unit, leaf in self._places.values():
            if leaf.in_state_dict:
                sizes[unit.name] = sizes.get(unit.name, 0) + leaf.value.nbytes
        self._report = Report(sizes)
        if atomic == "model":
            require_room(sum(leaf.value.nbytes for _, leaf in self._places.values()))

    def feed(self, weights: Iterable[tuple[str, torch.Tensor]]) -> None:
        """Put each tensor in its place. Raises `ReloadError`, undone."""
        try:
            for name, tensor in read(weights):
                if name in self._sent:
                    raise ReloadUnexpectedError(f"{name} was sent twice.")
                self._sent.add(name)
                self._copy(name, tensor)
        except BaseException as error:
            self._fail(error)
            raise

    def complete(self) -> None:
        """Each tensor is whole by itself; after `sleep(level=2)` all have to come.

        Raises `ReloadError`, undone.
        """
        unsent = [leaf for path, (_, leaf) in self._places.items() if path not in self._sent]
        try:
            lost.refuse_unsent(self._model, unsent)
        except ReloadError as error:
            self.take_back(error)

    def take_back(self, error: ReloadError) -> NoReturn:
        """Undo everything for a reason of the caller's, and raise `error`."""
        self._fail(error)
        raise error

    def _fail(self, error: BaseException) -> None:
        self._undo.roll_back()
        if isinstance(error, ReloadError):
            error.changed = self._atomic == "layer" and bool(self._report.changed)
            error.args = (f"{error}\n{self._said()}",)

    def commit(self) -> Report:
        """Let go of the old weights."""
        self._undo.forget()
        lost.found(self._model)
        self._report.seconds = time.perf_counter() - self._began
        return self._report

    def _said(self) -> str:
        if lost.is_lost(self._model):
            return lost.SAID
        if self._atomic == "model":
            return "The engine holds the weights it had before."
        return f"Tensors that came before it are in place, in {len(self._report.changed)} layers."

    def _copy(self, name: str, tensor: torch.Tensor) -> None:
        if name not in self._places:
            raise ReloadUnexpectedError(f"{name} is no tensor of the running model.")
        unit, leaf = self._places[name]
        if unit.name in self._opaque:
            raise ReloadInPlaceError(
                f"{name}: the kernel of {unit.name} reads a packed copy ({self._opaque[unit.name]}), "
                "which can't be made from it. Send weights in the checkpoint's format."
            )
        place = leaf.value
        if place.shape != tensor.shape or place.dtype != tensor.dtype:
            raise ReloadMismatchError(
                f"{name} is {describe(tensor)}, and {describe(place)} in the running model."
            )
        kind = _SCALES.get(leaf.attribute or "")
        if kind is not None:
            refuse_bad_values(tensor, name, zero=False)
        changed = not same_bits(place, tensor)
        with torch.no_grad():
            if changed:
                self._undo.keep_tensor(place)
                place.data.copy_(tensor)
            if kind is not None:
                self._follow(unit.modules[leaf.owner], kind, float(tensor.max()))
        self._report.note(unit.name, changed)
        if self._atomic == "layer":
            self._undo.forget()

    def _follow(self, layer: Any, kind: str, value: float) -> None:
        """Let the host mirrors of a KV scale repeat it: of several heads' scales the greatest."""
        name = f"_{kind}_scale_float"
        self._undo.keep_value(lambda old: setattr(layer, name, old), getattr(layer, name))
        setattr(layer, name, value)
        if kind in KINDS_WITH_HOST_TENSOR:
            host = getattr(layer, f"_{kind}_scale_cpu")
            self._undo.keep_tensor(host)
            host.fill_(value)
