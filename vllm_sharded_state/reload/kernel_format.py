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
    shown,
)
from vllm_sharded_state.state import boundaries, units
from vllm_sharded_state.state.compare import describe, place
from vllm_sharded_state.state.kernels import same_bits
from vllm_sharded_state.state.kv_scales import KINDS, KINDS_WITH_HOST_TENSOR
from vllm_sharded_state.state.units import Unit
from vllm_sharded_state.state.walk import Kind, Leaf

from . import kv, lost, outcome
from .intake import read
from .memory import refuse_live, storages
from .placing import Written
from .report import Report
from .undo import UndoLog, require_room
from .validate import refuse_bad_values

_SCALES = {f"_{kind}_scale": kind for kind in KINDS}
_HOST_TENSORS = frozenset(f"_{kind}_scale_cpu" for kind in KINDS_WITH_HOST_TENSOR)


class KernelFormat:
    """Tensors by the names that `state_dict()` shows, in the shape and dtype that they have there.

    Every one is copied in place and can be taken back, as in `Transaction`; `atomic` means the same.
    """

    def __init__(self, model: nn.Module, vllm_config: Any, atomic: str = "model") -> None:
        self._began = time.perf_counter()
        self._model = model
        self._config = vllm_config
        self._atomic = atomic
        self._undo = UndoLog()
        self._sent: set[str] = set()
        self._live = storages(model)
        self._written: Written = {}
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
        self._paths = self._second_names()
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
                    raise ReloadUnexpectedError(f"{shown(name)} was sent twice.")
                refuse_live(shown(name), tensor, self._live)
                self._sent |= {name, self._paths.get(name, name)}
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
        self._report.seconds = time.perf_counter() - self._began

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
        scales = {path for path, (_, leaf) in self._places.items() if leaf.attribute in _SCALES}
        if scales <= self._sent:
            kv.settle(self._model)
        return self._report

    def _said(self) -> str:
        if self._atomic == "model" or lost.is_lost(self._model):
            return outcome.said(self._model, [])
        return f"Tensors that came before it are in place, in {len(self._report.changed)} layers."

    def _second_names(self) -> dict[str, str]:
        """Other names that the model has for its tensors, under LoRA say, each with the one used here."""
        paths = {id(leaf.value): path for path, (_, leaf) in self._places.items()}
        named = (
            *self._model.named_parameters(remove_duplicate=False),
            *self._model.named_buffers(remove_duplicate=False),
        )
        return {
            name: paths[id(t)] for name, t in named if name not in self._places and id(t) in paths
        }

    def _copy(self, name: str, tensor: torch.Tensor) -> None:
        path = self._paths.get(name, name)
        if path not in self._places:
            raise ReloadUnexpectedError(f"{shown(name)} is no tensor of the running model.")
        unit, leaf = self._places[path]
        if leaf.attribute in _HOST_TENSORS:
            raise ReloadUnexpectedError(f"{name} repeats {path.removesuffix('_cpu')}. Send that.")
        if unit.name in self._opaque:
            raise ReloadInPlaceError(
                f"{name}: the kernel of {unit.name} reads a packed copy ({self._opaque[unit.name]}), "
                "which can't be made from it. Send weights in the checkpoint's format."
            )
        live = leaf.value
        if live.shape != tensor.shape or live.dtype != tensor.dtype:
            raise ReloadMismatchError(
                f"{name} is {describe(tensor)}, and {describe(live)} in the running model."
            )
        kind = _SCALES.get(leaf.attribute or "")
        if kind is not None:
            refuse_bad_values(tensor, name, zero=False)
        changed = not same_bits(live, tensor)
        first, _ = self._written.setdefault(place(live), (name, changed))
        if changed and first != name:
            raise ReloadInPlaceError(
                f"{first} and {name} are one tensor in the running model, and were sent with different "
                "contents. Send one content for both."
            )
        with torch.no_grad():
            if changed:
                self._undo.keep_tensor(live)
                live.data.copy_(tensor)
            if kind is not None:
                self._follow(unit.modules[leaf.owner], kind, float(tensor.max()))
                if changed:
                    kv.forget_baked(unit.root, unit.name, self._config, self._undo)
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
