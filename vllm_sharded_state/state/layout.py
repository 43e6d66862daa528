"""Choose, for each unit of a live model, the layout in which it can be saved and come back exactly.

Nothing is assumed about a quantization method. What a load would do is tried out on a twin of the
unit, and compared with the live one: structure, bytes, Python values, and the kernel's results.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any, Protocol

import torch
from vllm.logger import init_logger

from vllm_sharded_state.errors import (
    NoSourceError,
    NotRepresentableError,
    StaleSourceError,
    listed,
)

from . import kernels, plain
from .candidates import KV_PARAMETERS, kv_scales, unchanged
from .compare import Difference, compare
from .rebuild import Fill, Rebuilt, opaque_paths, rebuild, volatile_paths, with_placeholders
from .twin import TwinPool, source_parameters
from .units import Unit
from .walk import Kind, Leaf

logger = init_logger("vllm.sharded_state.layout")

#: Source tensors by `state_dict()` key.
Tensors = dict[str, torch.Tensor]


class Source(Protocol):
    """Where source tensors can be read again (`SourceReader`, or a saved directory)."""

    def side_effects(self, unit: str) -> dict[str, object]:
        """Python values, by path, that loading leaves on the unit's modules before processing."""

    def read(self, unit: str, device: torch.device) -> tuple[dict[str, torch.Tensor], list[str]]:
        """The unit's source tensors by key, and the keys that were not filled completely."""


@dataclass
class UnitState:
    """What is saved of one unit.

    source: tensors placed before processing, by `state_dict()` key (empty in runtime layout).
    before: Python values, by path, that are set before processing.
    overlay: live leaves that are put back after processing.
    replaced: paths in the overlay whose tensor takes the place of one of another form.
    method: class of the quantization method, as the constructor chose it.
    kernels: checksums of what the live kernels give, by module (see `kernels.digest`).
    """

    unit: Unit
    layout: str
    source: dict[str, torch.Tensor] = field(default_factory=dict)
    before: dict[str, object] = field(default_factory=dict)
    overlay: list[Leaf] = field(default_factory=list)
    replaced: frozenset[str] = frozenset()
    method: str | None = None
    kernels: dict[str, str] = field(default_factory=dict)

    @property
    def is_whole_in_source(self) -> bool:
        """Whether its source tensors are all that a load needs, upstream's own included."""
        return self.layout == "source" and not (self.overlay or self.before)


class Chooser:
    """Finds the layout of one unit after another. `wanted` is `auto`, `runtime` or `source`."""

    def __init__(
        self,
        vllm_config: Any,
        device: torch.device,
        initial: dict[str, torch.Tensor],
        wanted: str,
        source: Callable[[], Source],
        prefix: str = "",
    ) -> None:
        self._config = vllm_config
        self._device = device
        self._initial = initial
        self._wanted = wanted
        self._pool = TwinPool(vllm_config, device, prefix)
        self._open_source = source
        self._source: Source | None = None

    def choose(self, unit: Unit, live: dict[str, Leaf]) -> UnitState:
        """The state of `unit`, whose leaves are `live`.

        Raises `NotRepresentableError` when neither layout, or not the wanted one, holds it;
        `StaleSourceError` when the checkpoint no longer gives the live weights; `NoSourceError` when
        there is no checkpoint and nothing else holds them.
        """
        if not unit.processed:
            return self._unprocessed(unit, live)
        method = method_name(self._pool.unused(unit.name).units[unit.name].root)
        # Before anything is tried: processing a copy could change what the live module reads.
        results = kernels.results(unit.modules, self._config, self._device)
        try:
            state = self._processed(unit, live, results)
        finally:
            self._mend(unit, live, results)
        state.method = method
        state.kernels = {name: result for name, result in results.items() if result is not None}
        return state

    def _mend(self, unit: Unit, live: dict[str, Leaf], results: dict[str, str | None]) -> None:
        """See that the live module computes what it did before its copies were processed.

        A method that keeps weights in a registry by name has overwritten them with those of a copy; then
        a copy with the right ones is processed. Raises `NotRepresentableError` when that is no help.
        """
        if self._unharmed(unit, results):
            return
        for tensors in self._sources(unit, live):

            def fill(key: str, place: torch.Tensor, tensors: Tensors = tensors) -> None:
                place.data.copy_(tensors[key])

            try:
                self._rebuild(unit, live, fill).discard()
            except Exception as error:  # noqa: BLE001 - any method may refuse the tensors, in any way
                logger.debug("a copy of %s can't be processed: %s", unit.name, error)
            if self._unharmed(unit, results):
                return
        raise NotRepresentableError(
            f"Processing a copy of {_title(unit)} changed what the live one computes, so they share "
            "state outside of both. It can't be saved; start the engine anew before using it."
        )

    def _unharmed(self, unit: Unit, results: dict[str, str | None]) -> bool:
        return kernels.results(unit.modules, self._config, self._device) == results

    def _sources(self, unit: Unit, live: dict[str, Leaf]) -> Iterator[Tensors]:
        """Source tensors of `unit`, the cheapest to have first."""
        declared = source_parameters(self._pool.unused(unit.name).units[unit.name])
        for tensors in (unchanged(declared, live), kv_scales(unit, declared, live, self._initial)):
            if tensors is not None:
                yield tensors
        try:
            yield self._reader().read(unit.name, self._device)[0]
        except NoSourceError as error:
            logger.debug("%s can't be read again: %s", unit.name, error)

    def _reader(self) -> Source:
        if self._source is None:
            self._source = self._open_source()
        return self._source

    def _processed(
        self, unit: Unit, live: dict[str, Leaf], results: dict[str, str | None]
    ) -> UnitState:
        reasons: list[str] = []
        if self._wanted != "source":
            state = self._runtime(unit, live, results, reasons)
            if state is not None:
                return state
            if self._wanted == "runtime":
                raise NotRepresentableError(
                    f"{_title(unit)} can't be saved in runtime layout:\n{listed(reasons)}\n"
                    "Save with layout=auto or layout=source (VSS_LAYOUT)."
                )
        return self._from_source(unit, live, results, reasons)

    def _unprocessed(self, unit: Unit, live: dict[str, Leaf]) -> UnitState:
        twin = self._pool.unused(unit.name)
        rebuilt = twin.leaves(twin.units[unit.name])
        difference = compare(live, rebuilt, opaque_paths(rebuilt), bytes_matter=False)
        problems = difference.unfit + [f"{p}: owned by native code" for p in difference.captured]
        if problems:
            raise NotRepresentableError(
                f"{_title(unit)} holds state that a load can't put back:\n{listed(problems)}"
            )
        if self._wanted != "source":
            return UnitState(
                unit, "runtime", overlay=difference.overlay, replaced=_paths(difference.replaced)
            )
        return UnitState(
            unit,
            "source",
            replaced=_paths(difference.replaced),
            source={leaf.path: leaf.value for leaf in difference.tensors if leaf.in_state_dict},
            overlay=[leaf for leaf in difference.overlay if not leaf.in_state_dict],
        )

    def _runtime(
        self,
        unit: Unit,
        live: dict[str, Leaf],
        results: dict[str, str | None],
        reasons: list[str],
    ) -> UnitState | None:
        """Rehearse on placeholders, put the live tensors in place, and see whether that is `unit`."""
        try:
            rehearsed = self._rebuild(unit, live, with_placeholders)
        except Exception as error:  # noqa: BLE001 - any method may fail on placeholders, in any way
            reasons.append(f"{unit.name}: processing placeholders failed: {_line(error)}")
            return None
        difference = compare(live, rehearsed.leaves, rehearsed.opaque, bytes_matter=False)
        captured = set(difference.captured)
        if _may_be_handles(difference):
            again = self._rebuild(unit, live, with_placeholders)
            captured |= volatile_paths(rehearsed, again)
            again.discard()
        # Processing made these values; that they agree here does not mean that they will there.
        made = [x for x in live.values() if x.kind is Kind.VALUE and rehearsed.made(x)]
        captured |= {leaf.path for leaf in made if plain.is_address_like(leaf.value)}
        reasons += [f"{path}: native code or an address" for path in sorted(captured)]
        reasons += difference.unfit
        if not any(results.values()):
            reasons += self._vanished(unit, live, rehearsed)
        if not reasons:
            rehearsed.put_back(difference.overlay)
            remaining = compare(live, rehearsed.leaves, rehearsed.opaque, bytes_matter=True)
            names = [leaf.path for leaf in remaining.overlay] + remaining.unfit
            reasons += [f"{name}: differs after it was put back" for name in names]
            reasons += self._kernel_mismatches(results, rehearsed)
        rehearsed.discard()
        if reasons:
            return None
        known = {leaf.path for leaf in difference.values}
        known |= {f"{leaf.path}.<class>" for leaf in difference.added + difference.replaced}
        expected = [x for x in made if plain.is_restorable(x.value) and x.path not in known]
        return UnitState(
            unit,
            "runtime",
            overlay=difference.overlay + expected,
            replaced=_paths(difference.replaced),
        )

    def _vanished(self, unit: Unit, live: dict[str, Leaf], rehearsed: Rebuilt) -> list[str]:
        """Parameters that processing took where nothing can follow.

        They are gone afterwards, and another value of theirs changes no leaf: if a kernel reads them, it
        does so from where Python can't see. (Of KV scales it is known that some are not read at all.)
        """
        gone = [
            key
            for key, leaf in rehearsed.constructed.items()
            if leaf.kind is Kind.PARAMETER
            and leaf.value.numel()
            and key.rpartition(".")[2] not in KV_PARAMETERS
            and not _is_full(rehearsed.leaves.get(key))
        ]
        vanished = []
        for key in gone:

            def fill(path: str, tensor: torch.Tensor, other: str = key) -> None:
                with_placeholders(f"other {path}" if path == other else path, tensor)

            again = self._rebuild(unit, live, fill)
            if not volatile_paths(rehearsed, again):
                vanished.append(f"{key}: taken away by processing, and no tensor shows where to")
            again.discard()
        return vanished

    def _from_source(
        self,
        unit: Unit,
        live: dict[str, Leaf],
        results: dict[str, str | None],
        reasons: list[str],
    ) -> UnitState:
        fallback: UnitState | None = None
        declared = source_parameters(self._pool.unused(unit.name).units[unit.name])
        candidates = (unchanged(declared, live), kv_scales(unit, declared, live, self._initial))
        for tensors in candidates:
            state = tensors and self._prove(unit, live, results, tensors, {}, [])
            if state and state.is_whole_in_source:
                return state
            fallback = fallback or state or None
        try:
            tensors, incomplete = self._reader().read(unit.name, self._device)
            before = self._reader().side_effects(unit.name)
        except NoSourceError as error:
            if fallback is not None:
                return fallback
            raise NoSourceError(f"{_title(unit)} can't be saved:\n{error}") from error
        failures: list[str] = []
        state = self._prove(unit, live, results, tensors, before, failures)
        if state is not None and (fallback is None or state.is_whole_in_source):
            return state
        if fallback is not None:
            return fallback
        failures += [f"{key}: not complete in the checkpoint" for key in incomplete]
        kind = StaleSourceError if _only_bytes(failures) else NotRepresentableError
        causes = [f"in runtime layout: {reason}" for reason in reasons]
        causes += [f"from the checkpoint: {failure}" for failure in failures]
        raise kind(
            f"{_title(unit)} can't be saved so that it comes back as it is:\n{listed(causes)}\n"
            "If its weights changed since they were loaded, start the engine from a checkpoint that "
            "holds the new ones, and save from there."
        )

    def _prove(
        self,
        unit: Unit,
        live: dict[str, Leaf],
        results: dict[str, str | None],
        tensors: dict[str, torch.Tensor],
        before: dict[str, object],
        failures: list[str],
    ) -> UnitState | None:
        """Process `tensors` on a twin: the result must be the live unit, to the kernel's last bit."""

        def fill(key: str, parameter: torch.Tensor) -> None:
            parameter.data.copy_(tensors[key])

        try:
            rebuilt = self._rebuild(unit, live, fill, before)
        except Exception as error:  # noqa: BLE001 - any method may refuse the tensors, in any way
            failures.append(f"{unit.name}: processing failed: {_line(error)}")
            return None
        difference = compare(live, rebuilt.leaves, rebuilt.opaque, bytes_matter=True)
        captured = set(difference.captured)
        if _may_be_handles(difference):
            again = self._rebuild(unit, live, fill, before)
            captured |= volatile_paths(rebuilt, again)
            again.discard()
        overlay = [leaf for leaf in difference.overlay if leaf.path not in captured]
        failures += difference.unfit
        failures += [f"{p}: a load does not create it" for p in captured - rebuilt.leaves.keys()]
        failures += [
            f"{leaf.path}: other bytes"
            for leaf in overlay
            if leaf.is_tensor and (leaf.kind is Kind.PARAMETER or captured)
        ]
        if captured and not any(results.values()):
            failures.append(
                f"{unit.name}: native code holds its weights, and nothing can compare them"
            )
        if not failures:
            rebuilt.put_back(overlay)
            failures += self._kernel_mismatches(results, rebuilt)
        rebuilt.discard()
        if failures:
            return None
        replaced = _paths(difference.replaced)
        return UnitState(unit, "source", dict(tensors), dict(before), overlay, replaced)

    def _rebuild(
        self,
        unit: Unit,
        live: dict[str, Leaf],
        fill: Fill,
        before: dict[str, object] | None = None,
    ) -> Rebuilt:
        constants = {p: leaf.value for p, leaf in live.items() if leaf.is_tensor} | self._initial
        return rebuild(self._pool, unit.name, self._device, fill, constants, before)

    def _kernel_mismatches(self, results: dict[str, str | None], other: Rebuilt) -> list[str]:
        rebuilt = kernels.results(other.unit.modules, self._config, self._device)
        return [
            f"{name}: its kernel gives another result"
            for name, result in results.items()
            if rebuilt[name] != result
        ]


def method_name(module: torch.nn.Module) -> str | None:
    """The class of the quantization method of `module`, or None."""
    method = getattr(module, "quant_method", None)
    return None if method is None else f"{type(method).__module__}.{type(method).__qualname__}"


def _is_full(leaf: Leaf | None) -> bool:
    return leaf is not None and leaf.is_tensor and leaf.value.numel() > 0


def _paths(leaves: list[Leaf]) -> frozenset[str]:
    return frozenset(leaf.path for leaf in leaves)


def _may_be_handles(difference: Difference) -> bool:
    """Whether something differs that could be an index into what native code or a registry keeps."""
    return bool(difference.values) or any(leaf.value.numel() <= 8 for leaf in difference.tensors)


def _only_bytes(failures: list[str]) -> bool:
    return all("bytes" in text or "kernel" in text or "complete" in text for text in failures)


def _title(unit: Unit) -> str:
    method = getattr(unit.root, "quant_method", None)
    kind = type(unit.root).__name__
    return f"{unit.name} ({kind}{f', {type(method).__name__}' if method is not None else ''})"


def _line(error: BaseException) -> str:
    text = str(error).strip().splitlines()
    return f"{type(error).__name__}: {text[0] if text else ''}"
