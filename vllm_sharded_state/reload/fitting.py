"""What of a saved rank goes where in a running model: decided for all of it, before anything is changed.

A unit that was saved as kernels read it has to give every tensor that the live unit holds, in its form,
or the tensor would stay old; a unit saved in source layout is built first, and gives its overlay here.
"""

from collections.abc import Iterable
from dataclasses import dataclass, field

import torch
from torch import nn
from vllm.model_executor.layers.attention import is_deferred_attention_layer

from vllm_sharded_state.errors import ReloadInPlaceError, listed
from vllm_sharded_state.faults import Faults
from vllm_sharded_state.saved_rank import SavedRank
from vllm_sharded_state.state import boundaries, plain, units
from vllm_sharded_state.state.compare import CONTAINERS, repeats_elements
from vllm_sharded_state.state.twin import Twin, source_parameters
from vllm_sharded_state.state.units import Unit
from vllm_sharded_state.state.walk import Kind, Leaf

from . import kv
from .placing import Assignment


@dataclass
class Fitted:
    """One live unit, and what of the checkpoint is put into it as it is.

    leaves: what it holds, by path. is_built: whether it was saved in source layout and has to be
    processed, which comes first. early, late: live tensors to fill from the tensors of either stage, by
    path. assignments: Python values.
    """

    unit: Unit
    leaves: dict[str, Leaf]
    is_built: bool
    early: list[tuple[str, torch.Tensor]] = field(default_factory=list)
    late: list[tuple[str, torch.Tensor]] = field(default_factory=list)
    assignments: list[Assignment] = field(default_factory=list)

    @property
    def is_attention(self) -> bool:
        """Whether it is an attention layer, in which the engine keeps state of its own."""
        return is_deferred_attention_layer(self.unit.root)


def fit(saved: SavedRank, model: nn.Module, twin: Twin) -> list[Fitted]:
    """How `saved` is put into `model`, which `twin` was like before it was processed: attention last.

    Raises `IncompleteError`, `UnexpectedTensorError` or `TensorMismatchError` as a load does, and
    `ReloadInPlaceError` where something can't be put where the old state lies.
    """
    fitter = _Fitter(saved, twin)
    fitted = [fitter.fit(unit, leaves) for unit, leaves in units.all_leaves(model)]
    fitter.refuse_unfit()
    return sorted(fitted, key=lambda one: one.is_attention)


class _Fitter:
    def __init__(self, saved: SavedRank, twin: Twin) -> None:
        self._saved = saved
        self._twin = twin
        self._values = saved.values.of("runtime")
        self._faults = Faults()
        self._unfit: list[str] = []
        self._early: set[str] = set()
        self._late: set[str] = set()
        self._set: set[str] = set()

    def fit(self, unit: Unit, leaves: dict[str, Leaf]) -> Fitted:
        fitted = Fitted(unit, leaves, unit.processed and self._saved.layout(unit) == "source")
        constructed = self._twin.leaves(self._twin.units[unit.name])
        for leaf in leaves.values():
            if leaf.is_tensor:
                self._tensor(fitted, leaf)
            elif leaf.path in self._values:
                self._value(fitted, leaf, self._values[leaf.path])
            elif not fitted.is_built:
                self._kept(fitted, leaf, constructed.get(leaf.path))
        if fitted.is_built:
            for key, tensor in source_parameters(self._twin.units[unit.name]).items():
                self._early.add(key)
                self._saved.match(key, tensor, self._saved.early, self._faults)
        return fitted

    def refuse_unfit(self) -> None:
        """Raise for what was found, and for what of the checkpoint has found no place."""
        self._faults.unexpected += self._saved.early.keys() - self._early
        self._faults.unexpected += self._saved.late.keys() - self._late
        self._faults.refuse(self._saved.directory, strict=True)
        self._unfit += [
            f"{path}: {value!r} was saved, and the running model lacks it"
            for path, value in self._values.items()
            if path not in self._set and value is not None
        ]
        if self._unfit:
            raise ReloadInPlaceError(
                f"What was saved in {self._saved.directory} can't be put where the running model's own "
                f"state lies:\n{listed(self._unfit)}\nStart the engine anew from it."
            )

    def _tensor(self, fitted: Fitted, leaf: Leaf) -> None:
        path, tensor = leaf.path, leaf.value
        if path in self._saved.late:
            entries, places = self._saved.late, fitted.late
            self._late.add(path)
        elif fitted.is_built:
            return  # given by building the unit, or refused then
        else:
            entries, places = self._saved.early, fitted.early
            self._early.add(path)
        self._saved.match(path, tensor, entries, self._faults)
        if repeats_elements(tensor):
            self._unfit.append(f"{path}: an expanded tensor, which can't be filled in place")
        places.append((path, tensor))

    def _value(self, fitted: Fitted, leaf: Leaf, value: object) -> None:
        self._set.add(leaf.path)
        if plain.equal(leaf.value, value) and not fitted.is_built:
            return
        if leaf.assign is not None:
            fitted.assignments.append((leaf, leaf.assign, value))
        elif not plain.equal(leaf.value, value):
            self._unfit.append(f"{leaf.path}: {leaf.value!r} here, {value!r} was saved")

    def _kept(self, fitted: Fitted, leaf: Leaf, constructed: Leaf | None) -> None:
        """See whether what the checkpoint is silent about is what it was when the model was built.

        A save names every value and every native object that processing made.
        """
        if leaf.kind is Kind.OPAQUE:
            is_made = constructed is None or constructed.kind is not Kind.OPAQUE
            if boundaries.may_hold_weights(leaf.value) or (is_made and not fitted.is_attention):
                self._unfit.append(f"{leaf.path}: memory that native code owns, and none was saved")
        elif fitted.is_attention and leaf.path in kv.paths(fitted.unit.name):
            # The float of a scale that was saved as the constructor gives it; here it may be another.
            if constructed is not None:
                self._value(fitted, leaf, constructed.value)
        elif fitted.is_attention or leaf.value is None or leaf.value in CONTAINERS:
            return
        elif constructed is None or not plain.equal(constructed.value, leaf.value):
            before = "nothing" if constructed is None else repr(constructed.value)
            self._unfit.append(
                f"{leaf.path}: {leaf.value!r} here, {before} in a model that was just built"
            )


def names(fitted: Iterable[Fitted]) -> set[str]:
    """The names of all modules of these units."""
    return {name for one in fitted for name in one.unit.modules}
