"""Choose, for each unit of a live model, the layout in which it can be saved and come back exactly.

Nothing is assumed about a quantization method. What a load would do is tried out on a twin of the
unit, and compared with the live one: structure, bytes, Python values, and the kernel's results.
"""

from collections.abc import Callable, Iterator
from typing import Any

import torch
from vllm.logger import init_logger

from vllm_sharded_state.errors import NoSourceError, NotRepresentableError, listed

from .bench import Bench, Results, paths
from .candidates import at_hand
from .compare import compare
from .rebuild import opaque_paths
from .runtime_trial import try_runtime
from .source_trial import try_source
from .unit_state import Source, Tensors, UnitState, method_name, title
from .units import Unit
from .walk import Leaf

logger = init_logger("vllm.sharded_state.layout")


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
        self._bench = Bench(vllm_config, device, initial, prefix)
        self._wanted = wanted
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
        method = method_name(self._bench.unused(unit.name).root)
        # Before anything is tried: processing a copy could change what the live module reads.
        results = self._bench.results(unit)
        try:
            state = self._processed(unit, live, results)
        finally:
            self._mend(unit, live, results)
        state.method = method
        state.kernels = {name: result for name, result in results.items() if result is not None}
        return state

    def _mend(self, unit: Unit, live: dict[str, Leaf], results: Results) -> None:
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
                self._bench.rebuild(unit, live, fill).discard()
            except Exception as error:  # noqa: BLE001 - any method may refuse the tensors, in any way
                logger.debug("a copy of %s can't be processed: %s", unit.name, error)
            if self._unharmed(unit, results):
                return
        raise NotRepresentableError(
            f"Processing a copy of {title(unit)} changed what the live one computes, so they share "
            "state outside of both. It can't be saved; start the engine anew before using it."
        )

    def _unharmed(self, unit: Unit, results: Results) -> bool:
        return self._bench.results(unit) == results

    def _sources(self, unit: Unit, live: dict[str, Leaf]) -> Iterator[Tensors]:
        """Source tensors of `unit`, the cheapest to have first."""
        yield from at_hand(unit, self._bench.declared(unit), live, self._bench.initial)
        try:
            yield self._reader().read(unit.name, self._bench.device)[0]
        except NoSourceError as error:
            logger.debug("%s can't be read again: %s", unit.name, error)

    def _reader(self) -> Source:
        if self._source is None:
            self._source = self._open_source()
        return self._source

    def _processed(self, unit: Unit, live: dict[str, Leaf], results: Results) -> UnitState:
        reasons: list[str] = []
        if self._wanted != "source":
            state = try_runtime(self._bench, unit, live, results, reasons)
            if state is not None:
                return state
            if self._wanted == "runtime":
                raise NotRepresentableError(
                    f"{title(unit)} can't be saved in runtime layout:\n{listed(reasons)}\n"
                    "Save with layout=auto or layout=source (VSS_LAYOUT)."
                )
        return try_source(self._bench, unit, live, results, self._reader, reasons)

    def _unprocessed(self, unit: Unit, live: dict[str, Leaf]) -> UnitState:
        rebuilt = self._bench.unused_leaves(unit)
        difference = compare(live, rebuilt, opaque_paths(rebuilt), bytes_matter=False)
        problems = difference.unfit + [f"{p}: owned by native code" for p in difference.captured]
        if problems:
            raise NotRepresentableError(
                f"{title(unit)} holds state that a load can't put back:\n{listed(problems)}"
            )
        if self._wanted != "source":
            return UnitState(
                unit,
                "runtime",
                overlay=difference.overlay,
                replaced=paths(difference.replaced),
                added=paths(difference.added),
            )
        return UnitState(
            unit,
            "source",
            replaced=paths(difference.replaced),
            added=paths(difference.added),
            source={leaf.path: leaf.value for leaf in difference.tensors if leaf.in_state_dict},
            overlay=[leaf for leaf in difference.overlay if not leaf.in_state_dict],
        )
