"""Try whether a unit can be saved in source layout: source tensors that give the live unit again."""

from collections.abc import Callable

import torch

from vllm_sharded_state.errors import (
    NoSourceError,
    NotRepresentableError,
    StaleSourceError,
    listed,
)

from .bench import Bench, Results, line, may_be_handles, paths
from .candidates import at_hand
from .compare import compare
from .rebuild import volatile_paths
from .unit_state import Source, UnitState, title
from .units import Unit
from .walk import Kind, Leaf


def try_source(
    bench: Bench,
    unit: Unit,
    live: dict[str, Leaf],
    results: Results,
    reader: Callable[[], Source],
    reasons: list[str],
) -> UnitState:
    """The first source tensors that, processed, are `unit`: its own, KV scales, the checkpoint's.

    `reasons` tells why it can't be saved in runtime layout, for the error. Raises as `Chooser.choose`.
    """
    fallback: UnitState | None = None
    for tensors in at_hand(unit, bench.declared(unit), live, bench.initial):
        state = _prove(bench, unit, live, results, tensors, {}, [])
        if state and state.is_whole_in_source:
            return state
        fallback = fallback or state
    try:
        tensors, incomplete = reader().read(unit.name, bench.device)
        before = reader().side_effects(unit.name)
    except NoSourceError as error:
        if fallback is not None:
            return fallback
        raise NoSourceError(f"{title(unit)} can't be saved:\n{error}") from error
    failures: list[str] = []
    state = _prove(bench, unit, live, results, tensors, before, failures)
    if state is not None and (fallback is None or state.is_whole_in_source):
        return state
    if fallback is not None:
        return fallback
    failures += [f"{key}: not complete in the checkpoint" for key in incomplete]
    kind = StaleSourceError if _only_bytes(failures) else NotRepresentableError
    causes = [f"in runtime layout: {reason}" for reason in reasons]
    causes += [f"from the checkpoint: {failure}" for failure in failures]
    raise kind(
        f"{title(unit)} can't be saved so that it comes back as it is:\n{listed(causes)}\n"
        "If its weights changed since they were loaded, start the engine from a checkpoint that "
        "holds the new ones, and save from there."
    )


def _prove(
    bench: Bench,
    unit: Unit,
    live: dict[str, Leaf],
    results: Results,
    tensors: dict[str, torch.Tensor],
    before: dict[str, object],
    failures: list[str],
) -> UnitState | None:
    """Process `tensors` on a twin: the result must be the live unit, to the kernel's last bit."""

    def fill(key: str, parameter: torch.Tensor) -> None:
        parameter.data.copy_(tensors[key])

    try:
        rebuilt = bench.rebuild(unit, live, fill, before)
    except Exception as error:  # noqa: BLE001 - any method may refuse the tensors, in any way
        failures.append(f"{unit.name}: processing failed: {line(error)}")
        return None
    difference = compare(live, rebuilt.leaves, rebuilt.opaque, bytes_matter=True)
    captured = set(difference.captured)
    if may_be_handles(difference):
        again = bench.rebuild(unit, live, fill, before)
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
        failures.append(f"{unit.name}: native code holds its weights, and nothing can compare them")
    if not failures:
        rebuilt.put_back(overlay)
        failures += bench.mismatches(results, rebuilt)
    rebuilt.discard()
    if failures:
        return None
    return UnitState(
        unit,
        "source",
        dict(tensors),
        dict(before),
        overlay,
        paths(difference.replaced),
        paths(difference.added),
    )


def _only_bytes(failures: list[str]) -> bool:
    return all("bytes" in text or "kernel" in text or "complete" in text for text in failures)
