"""A reload of a model as one transaction: each unit is built beside the live one, then put in its place.

What is sent passes the model's own `load_weights` on a twin without memory. As soon as all of a unit is
there, it is given memory, filled by its weight loaders, processed by upstream's own function, checked,
and put where the live unit's tensors lie; what it overwrites goes to the undo log. So the live model is
whole between any two units, and beside it there is one unit on the device at a time. An error undoes
everything.
"""

import time
from collections.abc import Iterable
from typing import Any, NoReturn

import torch
from torch import nn
from torch.utils._python_dispatch import _disable_current_modes
from vllm.logger import init_logger
from vllm.model_executor.layers.attention import is_deferred_attention_layer

from vllm_sharded_state.errors import (
    ReloadError,
    ReloadIncompleteError,
    ReloadInPlaceError,
    ReloadMismatchError,
    ReloadUnexpectedError,
    ShardedStateError,
    listed,
)
from vllm_sharded_state.state import units
from vllm_sharded_state.state.construction import Construction, recall
from vllm_sharded_state.state.process import load_device
from vllm_sharded_state.state.recording import Recording
from vllm_sharded_state.state.twin import Twin, source_parameters
from vllm_sharded_state.state.units import Unit

from . import kv, lost, outcome
from .building import Builder
from .derived import Derived
from .handles import Handles
from .intake import Intake
from .kv import KvScales
from .memory import storages
from .original import Original
from .placing import Written, plan
from .report import Report, sizes
from .tied import Tied
from .undo import UndoLog, require_room

logger = init_logger("vllm.sharded_state.reload")


class Transaction:
    """New weights for `model`: `feed` them, `complete`, then `commit`, or `take_back`.

    The first two raise when the weights can't be taken, and have undone everything then.

    atomic: `model` takes everything back after an error. `layer` keeps no copy of old weights; then
    units that were placed before the error are new, each of them whole, and the error lists them.
    """

    def __init__(self, model: nn.Module, vllm_config: Any, atomic: str = "model") -> None:
        construction = recall(model) or Construction(vllm_config)
        config = vllm_config
        self._began = time.perf_counter()
        self._model = model
        self._atomic = atomic
        self._device = load_device(config)
        self._live: dict[str, Unit] = {unit.name: unit for unit in units.split(model)}
        self._inside = units.inside(model)
        self._twin = Twin(config, self._device)
        if atomic == "model":
            require_room(max(_nbytes(self._live), _nbytes(self._twin.units)))
        self._scales = KvScales(self._twin, self._live, model, construction)
        self._undo = UndoLog()
        self._handles = Handles(config, self._device)
        self._written: Written = {}
        self._done: set[str] = set()
        self._wanted: dict[str, dict[str, torch.Tensor]] = {}
        keys: dict[int, str] = {}
        self._units_of: dict[int, list[str]] = {}
        for name, unit in self._twin.units.items():
            self._wanted[name] = source_parameters(unit)
            for key, tensor in self._wanted[name].items():
                keys.setdefault(id(tensor), key)
                self._units_of.setdefault(id(tensor), []).append(name)
        self._report = Report(sizes(self._twin.units))
        parallel = config.parallel_config
        whole = parallel.tensor_parallel_size == 1 and not parallel.enable_expert_parallel
        self._tied = Tied(self._live, self._twin.model)
        self._intake = Intake(keys, self._scales, whole, storages(model), self._tied.repeated)
        self._recording = Recording(self._twin, self._watch)
        self._intake.attach(self._recording)
        self._derived = Derived(self._recording)
        self._builder = Builder(
            self._recording, construction.initial, self._tied.shared, self._device
        )
        self._original = Original(config, self._device)
        self._touched: set[str] = set()
        for key, tensor in (item for wanted in self._wanted.values() for item in wanted.items()):
            if not self._recording.knows(tensor):
                raise ReloadInPlaceError(
                    f"{key} can't be built without memory in this model, so new weights can't be "
                    "tried out beside the old ones. Start the engine anew."
                )

    def feed(self, weights: Iterable[tuple[str, torch.Tensor]]) -> Any:
        """Take `weights` in; call it as often as there are more. Raises `ReloadError`, undone.

        Returns what the model's `load_weights` does: the names of the parameters that it loaded.
        """
        try:
            return self._load(self._intake.stream(weights, self._place_complete))
        except BaseException as error:
            self._fail(error)
            raise

    def own(self) -> None:
        """Copy what is held of the sender's memory, each tensor on its device: it may be reused."""
        self._intake.own()
        self._recording.own()

    def complete(self) -> None:
        """See that everything that was touched is whole and in place. Raises `ReloadError`, undone."""
        try:
            self._derived.refuse()
            self._refuse_unplaced()
            self._place_rest()
            for name in self._tied.followers(self._done):
                self._place(name, self._loadable(name))
            self._tied.refuse_others(self._intake.unplaced, self._recording)
            self._scales.place_all(self._recording, self._undo, self._placed)
            self._refuse_late()
            lost.refuse_units_unsent(self._model, self._done)
            self._report.seconds = time.perf_counter() - self._began
        except BaseException as error:
            self._fail(error)
            raise

    def abandon(self) -> str:
        """Undo everything, and say what the engine holds now. Raises `ReloadBrokenError`."""
        self._undo.roll_back()
        return outcome.said(self._model, self._kept)

    def take_back(self, error: ReloadError) -> NoReturn:
        """Undo everything for a reason of the caller's, and raise `error`."""
        self._fail(error)
        raise error

    def commit(self) -> Report:
        """Let go of the old weights."""
        self._scales.settle()
        self._scales.log_kept()
        self._undo.forget()
        lost.found(self._model)
        return self._report

    def _load(self, weights: Iterable[tuple[str, torch.Tensor]]) -> Any:
        try:
            return self._recording.run(weights)
        except ShardedStateError:
            raise
        except Exception as error:
            # A model's own load_weights may refuse what it is given with any error.
            name = self._intake.current or "A tensor"
            reason = (str(error).strip().splitlines() or [""])[0]
            kind = ReloadMismatchError if self._intake.was_placed else ReloadUnexpectedError
            what = "has a form the model can't take" if self._intake.was_placed else "has no place"
            raise kind(f"{name} {what}: {type(error).__name__}: {reason[:300]}") from error

    def _watch(self, parameter: torch.Tensor, loaded: list[torch.Tensor]) -> None:
        self._intake.watch(parameter, loaded)
        self._touched.update(self._units_of.get(id(parameter), ()))

    def _fail(self, error: BaseException) -> None:
        """Undo everything, and say in `error` what the engine holds now."""
        self._undo.roll_back()
        outcome.tell(error, self._model, self._kept)

    @property
    def _kept(self) -> list[str]:
        """The units whose new weights stay after an error."""
        return sorted(self._done) if self._atomic == "layer" else []

    def _loadable(self, name: str) -> dict[str, torch.Tensor]:
        """The source tensors of a unit but for KV scales, by key."""
        scales = self._scales.by_parameter
        return {k: t for k, t in self._wanted[name].items() if id(t) not in scales}

    def _place_complete(self) -> None:
        """Place the units of which the last tensor has come."""
        for name in sorted(self._touched - self._done):
            root = self._twin.units[name].root
            wanted = self._loadable(name)
            has_buffers = any(not isinstance(t, nn.Parameter) for t in wanted.values())
            if is_deferred_attention_layer(root) or has_buffers:
                continue  # what may still come does not show
            if self._is_complete(wanted):
                self._place(name, wanted)
        self._touched.clear()

    def _is_complete(self, wanted: dict[str, torch.Tensor]) -> bool:
        """Whether all of a unit has come, and no more of it is to be expected.

        Of a fused layer some parameters are whole with the first projection, and are written again with
        each of the others: then the unit waits for as many loads as its other parameters had.
        """
        most = max(self._recording.calls(tensor) for tensor in wanted.values())
        for tensor in wanted.values():
            coverage = self._recording.coverage[id(tensor)]
            if not coverage.is_whole():
                return False
            if coverage.at_once and self._recording.calls(tensor) < most:
                return False
        return True

    def _place_rest(self) -> None:
        """Place the units that were touched and not placed: padded ones, and attention layers."""
        missing: dict[str, list[str]] = {}
        rest: list[str] = []
        for name in self._wanted:
            wanted = self._loadable(name)
            if name in self._done or not any(self._recording.is_loaded(t) for t in wanted.values()):
                continue
            rest.append(name)
            for key, tensor in wanted.items():
                problem = self._missing(key, tensor)
                if problem:
                    missing[key] = problem
        if missing:
            lines = [f"{key}: {', '.join(problem)}" for key, problem in missing.items()]
            raise ReloadIncompleteError(
                f"Layers were sent in part, and new weights can't stand beside old ones in them. "
                f"Missing:\n{listed(lines)}\nSend whole layers."
            )
        for name in sorted(rest, key=lambda n: is_deferred_attention_layer(self._live[n].root)):
            self._place(name, self._loadable(name))

    def _missing(self, key: str, tensor: torch.Tensor) -> list[str]:
        """What of a source tensor should have been sent and was not: empty when nothing is missing."""
        if not isinstance(tensor, nn.Parameter) and not self._recording.is_loaded(tensor):
            return []  # a buffer that no checkpoint has to hold
        if self._recording.coverage[id(tensor)].is_whole():
            return []
        _, untouched = self._recording.play_twice(tensor, self._device)
        if not bool(untouched.any()):
            return []
        return self._original.missing(key, untouched, self._intake.sent)

    def _place(self, name: str, wanted: dict[str, torch.Tensor]) -> None:
        """Build the unit `name` from what was sent, and put it in the place of the live one."""
        with _disable_current_modes():
            live_unit = self._live[name]
            live = units.leaves(live_unit, self._inside)
            built, before = self._builder.build(name, wanted, live)
            is_attention = is_deferred_attention_layer(live_unit.root)
            if is_attention:
                scales = kv.paths(name)
                built = {path: leaf for path, leaf in built.items() if path not in scales}
                live = {path: leaf for path, leaf in live.items() if path not in scales}
            placing = plan(name, live, built, before, is_attention)
            changed = placing.apply(self._undo, self._written, keep=self._atomic == "model")
            if placing.assignments:
                self._handles.keep_alive(live_unit, built, placing, self._undo)
            self._placed(name, changed)
            self._builder.discard()
        for tensor in wanted.values():
            if all(name in self._done for name in self._units_of[id(tensor)]):
                self._recording.forget(tensor)

    def _placed(self, name: str, changed: bool) -> None:
        self._done.add(name)
        self._report.note(name, changed)
        if self._atomic == "layer":
            self._undo.forget()

    def _refuse_unplaced(self) -> None:
        names = self._original.unexpected(list(self._intake.unplaced), self._twin.model)
        if names and self._intake.collects:
            # It may have made others of them, whose addresses say nothing.
            logger.warning(
                "This model collects tensors before it loads them; whether it took these can't be "
                "told:\n%s",
                listed(names),
            )
            return
        if names:
            raise ReloadUnexpectedError(
                f"Tensors were sent that have no place in the model:\n{listed(names)}\n"
                "Send what the model's checkpoint holds, under its names."
            )

    def _refuse_late(self) -> None:
        """What came for a unit that was placed already must be what it was filled with."""
        for name in sorted(self._done):
            for key, tensor in self._loadable(name).items():
                if not self._recording.is_loaded(tensor):
                    continue
                if not self._builder.is_the_same(tensor):
                    raise ReloadUnexpectedError(
                        f"{key} was sent again after all of it had come. Send each tensor once."
                    )


def _nbytes(parts: dict[str, Unit]) -> int:
    """Bytes of all parameters and buffers of a model's units; tied ones once."""
    tensors = {id(t): t for unit in parts.values() for t in source_parameters(unit).values()}
    return sum(tensor.nbytes for tensor in tensors.values())
