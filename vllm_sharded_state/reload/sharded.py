"""A reload from sharded state: each rank's own tensors, read into the running model's.

What a load of sharded state refuses is refused here before anything is touched. Tensors in runtime layout
are then read straight to where the live ones lie, of which the undo log has the bytes; units in source
layout are built beside the live ones, as in a reload from tensors. Last, the checks of a load.
"""

import time
from collections.abc import Iterable, Iterator
from dataclasses import replace
from typing import Any, NoReturn

import torch
from torch import nn

from vllm_sharded_state import admission, options
from vllm_sharded_state.errors import MismatchError, ReloadError
from vllm_sharded_state.held import Held
from vllm_sharded_state.mirrors import refuse_forged
from vllm_sharded_state.options import Options
from vllm_sharded_state.remote import FORMATS
from vllm_sharded_state.state import plain, units
from vllm_sharded_state.state.choices import choices
from vllm_sharded_state.state.compare import place
from vllm_sharded_state.state.construction import Construction, recall
from vllm_sharded_state.state.kernels import same_bits
from vllm_sharded_state.state.kv_scales import SCALE_BUFFERS
from vllm_sharded_state.state.process import load_device
from vllm_sharded_state.state.twin import Twin, source_parameters
from vllm_sharded_state.state.units import Unit

from . import kv, lost, outcome
from .building import UnitBuilder
from .fitting import Fitted, fit
from .handles import Handles
from .placing import Written, assign_all, plan
from .report import Report, sizes
from .undo import UndoLog, require_room
from .validate import refuse_bad_scale, refuse_bad_values


class ShardedTransaction:
    """The sharded state `held` for `model`: `complete` it, then `commit`, or `take_back`.

    The same steps as of `Transaction`, and `atomic` means the same. Nothing is fed.
    """

    def __init__(
        self, held: Held, model: nn.Module, vllm_config: Any, atomic: str = "model"
    ) -> None:
        """Raise `ShardedStateError` unless `held` fits the model; nothing is changed yet."""
        self._began = time.perf_counter()
        self._config = vllm_config
        self._model = model
        self._atomic = atomic
        self._device = load_device(vllm_config)
        self._undo = UndoLog()
        self._handles = Handles(vllm_config, self._device)
        self._written: Written = {}
        asked, pattern = _asked(vllm_config.load_config)
        admission.refuse_other_source(held.manifest, held.location, asked)
        self._saved = admission.open_rank(held.manifest, held.location, vllm_config, pattern, asked)
        try:
            _refuse_other_tie(held, model, vllm_config)
            self._twin = Twin(vllm_config, self._device)
            self._saved.refuse_other_units(self._twin.units.values())
            self._saved.refuse_other_choices(self._twin.units.values(), processed=False)
            self._saved.refuse_other_choices(units.split(model), processed=True)
            self._report = Report(sizes(self._twin.units))
            self._fitted = fit(self._saved, model, self._twin)
            self._refuse_bad_kv_scales()
            if atomic == "model":
                require_room(self._saved.nbytes)
        except BaseException:
            self._saved.reader.close()
            raise
        construction = recall(model) or Construction(vllm_config)
        self._initial = construction.initial
        self._builder = UnitBuilder(self._twin, construction.initial, self._device)
        self._early = self._saved.filling(self._saved.early)
        self._late = self._saved.filling(self._saved.late)

    def feed(self, weights: Iterable[tuple[str, torch.Tensor]]) -> None:
        """Nothing is sent: all of it lies in the checkpoint."""

    def complete(self) -> None:
        """Put everything in its place and check it. Raises `ShardedStateError`, undone."""
        try:
            for group in self._groups():
                changed = self._place(group)
                self._check(group)
                for name, is_new in changed.items():
                    self._report.note(name, is_new)
                if self._atomic == "layer":
                    self._undo.forget()
            for filling, stage in ((self._early, "early"), (self._late, "late")):
                filling.refuse_overwritten([x for one in self._fitted for x in getattr(one, stage)])
            self._report.seconds = time.perf_counter() - self._began
        except BaseException as error:
            self._fail(error)
            raise

    def take_back(self, error: ReloadError) -> NoReturn:
        """Undo everything for a reason of the caller's, and raise `error`."""
        self._fail(error)
        raise error

    def commit(self) -> Report:
        """Let go of the old weights."""
        kv.settle(self._model)
        self._undo.forget()
        lost.found(self._model)
        self._saved.reader.close()
        return self._report

    def _fail(self, error: BaseException) -> None:
        """Undo everything, and say in `error` what the engine holds now."""
        self._saved.reader.close()
        self._undo.roll_back()
        placed = self._report.changed + self._report.unchanged
        outcome.tell(error, self._model, placed if self._atomic == "layer" else [])

    def _groups(self) -> Iterator[list[Fitted]]:
        """What is read at once and taken back together: all of it, or one unit."""
        if self._atomic == "model":
            yield self._fitted
        else:
            yield from ([one] for one in self._fitted)

    def _place(self, group: list[Fitted]) -> dict[str, bool]:
        """Put all of a group in its place; returns, by unit, whether anything is new."""
        scales = {one.unit.name: _kv_scales(one) for one in group}
        changed = {one.unit.name: one.is_built and self._build(one) for one in group}
        old: dict[tuple[object, ...], torch.Tensor] = {}
        for filling, places in (
            (self._early, [fill for one in group for fill in one.early]),
            (self._late, [fill for one in group for fill in one.late]),
        ):
            for _, tensor in places:
                kept = self._undo.keep_tensor(tensor)
                if kept is not None:
                    old[place(tensor)] = kept
            filling.fill(places)
        for one in group:
            name, places = one.unit.name, one.early + one.late
            is_new = (not same_bits(old[place(x)], x) for _, x in places if place(x) in old)
            is_set = (not plain.equal(leaf.value, value) for leaf, _, value in one.assignments)
            changed[name] |= any(is_new) or any(is_set)
            assign_all(one.assignments, self._undo)
            if one.is_attention and scales[name] != _kv_scales(one):
                kv.forget_baked(one.unit.root, name, self._config, self._undo)
        return {x.unit.name: changed[x.unit.name] for x in group if x.is_built or x.early or x.late}

    def _build(self, one: Fitted) -> bool:
        """Process the source tensors of a unit, and put what comes out in the place of the live one.

        Returns whether anything is new.
        """

        def fill(unit: Unit) -> frozenset[str]:
            places = source_parameters(unit)
            self._early.fill(places.items())
            self._saved.values.put(self._twin.leaves(unit), "source")
            return frozenset(places)

        name = one.unit.name
        built, before = self._builder.build_with(name, one.leaves, fill)
        # What the constructor gave is given again, as a load does; the rest is the live unit's own.
        given = self._initial.keys() | (kv.paths(name) if one.is_attention else set())
        before.tensors = {p: x for p, x in before.tensors.items() if p not in given}
        before.values = {p: x for p, x in before.values.items() if p not in given}
        placing = plan(name, one.leaves, built, before, one.is_attention)
        changed = placing.apply(self._undo, self._written)
        if placing.assignments:
            self._handles.keep_alive(one.unit, built, placing, self._undo)
        self._builder.discard()
        return changed

    def _compared(self, group: list[Fitted]) -> list[str]:
        """The modules whose results are compared with those of the save.

        The smallest of each kind, as its method and kernels tell it: that the bytes are those of the save
        is known, and a kernel that reads others, out of sight, does so in all modules of its kind.
        """
        kinds: dict[object, tuple[int, str]] = {}
        for one in group:
            kind = frozenset(choices(one.unit).items())
            for name, module in one.unit.modules.items():
                if name in self._saved.entry.kernels:
                    below = (kind, name.removeprefix(one.unit.name))
                    size = sum(parameter.numel() for parameter in module.parameters())
                    kinds[below] = min(kinds.get(below, (size, name)), (size, name))
        return [name for _, name in kinds.values()]

    def _refuse_bad_kv_scales(self) -> None:
        """Raise `ReloadScaleError` for a KV scale that is not finite and positive."""
        paths = [p for p in self._saved.late if p.rpartition(".")[2] in SCALE_BUFFERS]
        cpu = torch.device("cpu")
        for path, scale in self._saved.filling(self._saved.late).fetch(paths, cpu).items():
            refuse_bad_values(scale, path, zero=False)

    def _check(self, group: list[Fitted]) -> None:
        """Scales are scales, host mirrors repeat their tensors, kernels compute what they did."""
        modules = {name: x for one in group for name, x in one.unit.modules.items()}
        for one in group:
            for path, leaf in one.leaves.items():
                if one.unit.processed and leaf.is_tensor and "scale" in (leaf.attribute or ""):
                    if leaf.attribute in SCALE_BUFFERS:
                        refuse_bad_values(leaf.value, path, zero=False)
                    else:
                        refuse_bad_scale(leaf.value, path)
        refuse_forged(modules, self._saved.directory)
        self._saved.refuse_other_results(modules, self._config, self._compared(group))


def _asked(load_config: Any) -> tuple[Options, str | None]:
    """The options of an engine on sharded state, and its pattern; defaults for any other."""
    if load_config.load_format not in FORMATS:
        return Options(), None
    upstream, asked = options.take(load_config)
    # What is missing would stay old, or be made up.
    return replace(asked, strict=True), upstream.model_loader_extra_config.get("pattern")


def _refuse_other_tie(held: Held, model: nn.Module, vllm_config: Any) -> None:
    """Raise `MismatchError` where word embeddings are one tensor here and two there, or the reverse."""
    heads = {id(x) for name, x in _parameters(model) if name.endswith("lm_head.weight")}
    others = {id(x) for name, x in _parameters(model) if not name.endswith("lm_head.weight")}
    tied = bool(heads & others)
    tied |= bool(getattr(vllm_config.model_config.hf_config, "tie_word_embeddings", False))
    if tied != held.manifest.tied_word_embeddings:
        here, there = ("one tensor", "two") if tied else ("two tensors", "one")
        raise MismatchError(
            f"Word embeddings and lm_head are {here} in the running model, and {there} in "
            f"{held.location}.\nStart the engine anew from it."
        )


def _parameters(model: nn.Module) -> Iterator[tuple[str, nn.Parameter]]:
    return model.named_parameters(remove_duplicate=False)


def _kv_scales(one: Fitted) -> dict[str, list[float]]:
    """The KV scales of an attention layer, by buffer."""
    found = {name: getattr(one.unit.root, name, None) for name in SCALE_BUFFERS}
    return {name: scale.flatten().tolist() for name, scale in found.items() if scale is not None}
