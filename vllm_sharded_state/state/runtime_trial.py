"""Try whether a unit can be saved in runtime layout: what a load would do, on placeholders."""

import torch

from . import plain
from .bench import Bench, Results, line, may_be_handles, paths
from .candidates import KV_PARAMETERS
from .choices import changed, choices
from .compare import compare
from .rebuild import Rebuilt, volatile_paths, with_placeholders
from .unit_state import UnitState
from .units import Unit
from .walk import Kind, Leaf


def try_runtime(
    bench: Bench,
    unit: Unit,
    live: dict[str, Leaf],
    results: Results,
    reasons: list[str],
) -> UnitState | None:
    """Rehearse on placeholders, put the live tensors in place, and see whether that is `unit`."""
    try:
        rehearsed = bench.rebuild(unit, live, with_placeholders)
    except Exception as error:  # noqa: BLE001 - any method may fail on placeholders, in any way
        reasons.append(f"{unit.name}: processing placeholders failed: {line(error)}")
        return None
    difference = compare(live, rehearsed.leaves, rehearsed.opaque, bytes_matter=False)
    captured = set(difference.captured)
    if may_be_handles(difference):
        again = bench.rebuild(unit, live, with_placeholders)
        captured |= volatile_paths(rehearsed, again)
        again.discard()
    # Processing made these values; that they agree here does not mean that they will there.
    made = [x for x in live.values() if x.kind is Kind.VALUE and rehearsed.made(x)]
    captured |= {leaf.path for leaf in made if plain.is_address_like(leaf.value)}
    reasons += [f"{path}: native code or an address" for path in sorted(captured)]
    reasons += difference.unfit
    if not any(results.values()):
        reasons += _vanished(bench, unit, live, rehearsed)
    if not reasons:
        rehearsed.put_back(difference.overlay)
        remaining = compare(live, rehearsed.leaves, rehearsed.opaque, bytes_matter=True)
        names = [leaf.path for leaf in remaining.overlay] + remaining.unfit
        reasons += [f"{name}: differs after it was put back" for name in names]
        reasons += bench.mismatches(results, rehearsed)
    chosen = choices(bench.unused(unit.name))
    later = changed(chosen, choices(rehearsed.unit))
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
        replaced=paths(difference.replaced),
        choices=chosen,
        processed=later,
        added=paths(difference.added),
    )


def _vanished(bench: Bench, unit: Unit, live: dict[str, Leaf], rehearsed: Rebuilt) -> list[str]:
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

        again = bench.rebuild(unit, live, fill)
        if not volatile_paths(rehearsed, again):
            vanished.append(f"{key}: taken away by processing, and no tensor shows where to")
        again.discard()
    return vanished


def _is_full(leaf: Leaf | None) -> bool:
    return leaf is not None and leaf.is_tensor and leaf.value.numel() > 0
