"""Choose, for each unit of a live model, the layout in which it can be saved and come back exactly.

Nothing is assumed about a quantization method. What a load would do is tried out on a twin of the
unit, and compared with the live one: structure, bytes, Python values, and the kernel's results.
"""

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, Protocol

import torch
from vllm.model_executor.layers.quantization.kv_cache import BaseKVCacheMethod

from vllm_sharded_state.errors import (
    NotRepresentableError,
    StaleSourceError,
    listed,
)

from . import kernels
from .compare import Difference, compare, same_form
from .rebuild import Fill, Rebuilt, opaque_paths, rebuild, volatile_paths, with_placeholders
from .twin import TwinPool, source_parameters
from .units import Unit
from .walk import Kind, Leaf


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
    """

    unit: Unit
    layout: str
    source: dict[str, torch.Tensor] = field(default_factory=dict)
    before: dict[str, object] = field(default_factory=dict)
    overlay: list[Leaf] = field(default_factory=list)


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
        reasons: list[str] = []
        if self._wanted != "source":
            state = self._runtime(unit, live, reasons)
            if state is not None:
                return state
            if self._wanted == "runtime":
                raise NotRepresentableError(
                    f"{_title(unit)} can't be saved in runtime layout:\n{listed(reasons)}\n"
                    "Save with layout=auto or layout=source (VSS_LAYOUT)."
                )
        return self._from_source(unit, live, reasons)

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
            return UnitState(unit, "runtime", overlay=difference.overlay)
        return UnitState(
            unit,
            "source",
            source={leaf.path: leaf.value for leaf in difference.tensors if leaf.in_state_dict},
            overlay=[leaf for leaf in difference.overlay if not leaf.in_state_dict],
        )

    def _runtime(self, unit: Unit, live: dict[str, Leaf], reasons: list[str]) -> UnitState | None:
        """Rehearse on placeholders, put the live tensors in place, and see whether that is `unit`."""
        try:
            rehearsed = self._rebuild(unit, live, with_placeholders)
        except Exception as error:  # noqa: BLE001 - any method may fail on placeholders, in any way
            reasons.append(f"{unit.name}: processing placeholders failed: {_line(error)}")
            return None
        difference = compare(live, rehearsed.leaves, rehearsed.opaque, bytes_matter=False)
        if _has_integers(difference):
            again = self._rebuild(unit, live, with_placeholders)
            difference.captured += sorted(volatile_paths(rehearsed, again))
            again.discard()
        reasons += [f"{path}: native code or an address" for path in difference.captured]
        reasons += difference.unfit
        if difference.captured or difference.unfit:
            rehearsed.discard()
            return None
        rehearsed.put_back(difference.overlay)
        remaining = compare(live, rehearsed.leaves, rehearsed.opaque, bytes_matter=True)
        if not remaining.is_empty:
            names = [leaf.path for leaf in remaining.overlay] + remaining.unfit
            reasons += [f"{name}: differs after it was put back" for name in names]
        else:
            reasons += self._kernel_mismatches(unit, rehearsed)
        rehearsed.discard()
        return None if reasons else UnitState(unit, "runtime", overlay=difference.overlay)

    def _from_source(self, unit: Unit, live: dict[str, Leaf], reasons: list[str]) -> UnitState:
        for candidate in (self._unchanged, self._kv_scales):
            tensors = candidate(unit, live)
            if tensors is not None:
                trial: list[str] = []
                state = self._prove(unit, live, tensors, {}, trial)
                if state is not None:
                    return state
        if self._source is None:
            self._source = self._open_source()
        tensors, incomplete = self._source.read(unit.name, self._device)
        before = self._source.side_effects(unit.name)
        failures: list[str] = []
        state = self._prove(unit, live, tensors, before, failures)
        if state is not None:
            return state
        failures += [f"{key}: not complete in the checkpoint" for key in incomplete]
        kind = StaleSourceError if _only_bytes(failures) else NotRepresentableError
        causes = [f"in runtime layout: {reason}" for reason in reasons]
        causes += [f"from the checkpoint: {failure}" for failure in failures]
        raise kind(
            f"{_title(unit)} can't be saved so that it comes back as it is:\n{listed(causes)}\n"
            "If its weights changed since they were loaded, start the engine from a checkpoint that "
            "holds the new ones, and save from there."
        )

    def _unchanged(self, unit: Unit, live: dict[str, Leaf]) -> dict[str, torch.Tensor] | None:
        """The live tensors, where each source tensor still is there in its form."""
        twin = self._pool.unused(unit.name)
        found: dict[str, torch.Tensor] = {}
        for key, meta in source_parameters(twin.units[unit.name]).items():
            leaf = live.get(key)
            if leaf is None or not leaf.is_tensor or not same_form(leaf.value, meta):
                return None
            found[key] = leaf.value
        return found

    def _kv_scales(self, unit: Unit, live: dict[str, Leaf]) -> dict[str, torch.Tensor] | None:
        """For KV-cache methods: the scale parameters, taken from the buffers made of them."""
        method = getattr(unit.root, "quant_method", None)
        if not isinstance(method, BaseKVCacheMethod):
            return None
        twin = self._pool.unused(unit.name)
        found: dict[str, torch.Tensor] = {}
        for key, meta in source_parameters(twin.units[unit.name]).items():
            owner, _, name = key.rpartition(".")
            for path in (key, f"{owner}._{name}".removeprefix(".")):
                leaf = live.get(path)
                if leaf is not None and leaf.is_tensor and leaf.value.numel() == meta.numel():
                    found[key] = leaf.value.detach().to(meta.dtype).reshape(meta.shape)
            if key not in found:
                initial = self._initial.get(key)
                if initial is None:
                    return None
                found[key] = initial.to(self._device, meta.dtype)
        return found

    def _prove(
        self,
        unit: Unit,
        live: dict[str, Leaf],
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
        if _has_integers(difference):
            again = self._rebuild(unit, live, fill, before)
            volatile = volatile_paths(rebuilt, again)
            difference.captured += sorted(volatile)
            difference.tensors = [x for x in difference.tensors if x.path not in volatile]
            difference.values = [x for x in difference.values if x.path not in volatile]
            again.discard()
        failures += difference.unfit
        failures += [f"{p}: a load does not create it" for p in _lacking(difference, rebuilt)]
        failures += [
            f"{leaf.path}: other bytes"
            for leaf in difference.tensors
            if leaf.kind is Kind.PARAMETER or difference.captured
        ]
        if difference.captured and not any(map(kernels.has_kernel, unit.modules.values())):
            failures.append(
                f"{unit.name}: native code holds its weights, and none can compare them"
            )
        if not failures:
            rebuilt.put_back(difference.overlay)
            failures += self._kernel_mismatches(unit, rebuilt)
        rebuilt.discard()
        if failures:
            return None
        return UnitState(unit, "source", dict(tensors), dict(before), difference.overlay)

    def _rebuild(
        self,
        unit: Unit,
        live: dict[str, Leaf],
        fill: Fill,
        before: dict[str, object] | None = None,
    ) -> Rebuilt:
        constants = {p: leaf.value for p, leaf in live.items() if leaf.is_tensor} | self._initial
        return rebuild(self._pool, unit.name, self._device, fill, constants, before)

    def _kernel_mismatches(self, unit: Unit, other: Rebuilt) -> list[str]:
        mismatches = []
        for name, module in unit.modules.items():
            if kernels.has_kernel(module):
                here = kernels.run(module, self._config, self._device)
                there = kernels.run(other.unit.modules[name], self._config, self._device)
                if not kernels.bit_equal(here, there):
                    mismatches.append(f"{name}: its kernel gives another result")
        return mismatches


def _lacking(difference: Difference, rebuilt: Rebuilt) -> list[str]:
    return [path for path in difference.captured if path not in rebuilt.leaves]


def _has_integers(difference: Difference) -> bool:
    """Whether something differs that could be an index into what native code keeps."""
    return any(type(leaf.value) is int for leaf in difference.values) or any(
        leaf.value.numel() <= 8 and not leaf.value.dtype.is_floating_point
        for leaf in difference.tensors
        if leaf.kind is Kind.ATTRIBUTE
    )


def _only_bytes(failures: list[str]) -> bool:
    return all("bytes" in text or "kernel" in text or "complete" in text for text in failures)


def _title(unit: Unit) -> str:
    method = getattr(unit.root, "quant_method", None)
    kind = type(unit.root).__name__
    return f"{unit.name} ({kind}{f', {type(method).__name__}' if method is not None else ''})"


def _line(error: BaseException) -> str:
    text = str(error).strip().splitlines()
    return f"{type(error).__name__}: {text[0] if text else ''}"
