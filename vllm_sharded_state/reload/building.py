"""Build one unit beside the live one: memory, what was sent, and upstream's own processing."""

from collections.abc import Callable

import torch
from torch import nn

from vllm_sharded_state.errors import ReloadInPlaceError
from vllm_sharded_state.state.process import process
from vllm_sharded_state.state.recording import Recording
from vllm_sharded_state.state.twin import Twin, materialize, source_parameters
from vllm_sharded_state.state.units import Unit
from vllm_sharded_state.state.walk import Leaf

from .placing import Before

#: Source tensors up to this many elements are kept until the end, for what is sent again late.
_SMALL = 4096


class UnitBuilder:
    """Builds units of `twin` on `device`, one at a time.

    `initial` holds the small tensors that the model's constructor computed, by path.
    """

    def __init__(self, twin: Twin, initial: dict[str, torch.Tensor], device: torch.device) -> None:
        self._twin = twin
        self._initial = initial
        self._device = device
        self._unused: _Modules | None = None

    def build_with(
        self, name: str, live: dict[str, Leaf], fill: Callable[[Unit], frozenset[str]]
    ) -> tuple[dict[str, Leaf], Before]:
        """What the unit `name` holds, filled and processed; and what it held in between.

        `live` is what the live unit holds. `fill` fills the source tensors of the unit that it is given,
        and tells the keys of those that are new weights. Raises `ReloadInPlaceError` when it can't be
        processed, and what `fill` raises.
        """
        self._unused = _Modules(self._twin.units[name])
        unit = self._twin.take(name)
        constants = {p: leaf.value for p, leaf in live.items() if leaf.is_tensor} | self._initial
        materialize(unit, self._twin.leaves(unit), self._device, constants)
        loaded = fill(unit)
        built = self._twin.leaves(unit)
        before = Before.of(built, loaded)
        if unit.processed:
            self._process(unit)
            built = self._twin.leaves(unit)
        return built, before

    def discard(self) -> None:
        """Let go of the unit that was built; what comes late for it can still be loaded."""
        if self._unused is not None:
            self._unused.restore()
            self._unused = None

    def _process(self, unit: Unit) -> None:
        try:
            process(unit, self._twin.vllm_config, self._device)
        except Exception as error:
            # Any quantization method may refuse what was sent, in any way.
            raise ReloadInPlaceError(
                f"Processing what was sent for {unit.name} failed: {type(error).__name__}: {error}"
            ) from error


class Builder(UnitBuilder):
    """Builds units of a recording's twin from what was sent; `initial` and `device` as above.

    `shared` holds the live tensors that another unit has too, by key: one that was not sent itself is
    new already.
    """

    def __init__(
        self,
        recording: Recording,
        initial: dict[str, torch.Tensor],
        shared: dict[str, torch.Tensor],
        device: torch.device,
    ) -> None:
        super().__init__(recording.twin, initial, device)
        self._recording = recording
        self._shared = shared
        self._kept: dict[int, torch.Tensor] = {}

    def build(
        self, name: str, wanted: dict[str, torch.Tensor], live: dict[str, Leaf]
    ) -> tuple[dict[str, Leaf], Before]:
        """As `build_with`, from what was recorded for `wanted`, its source tensors on meta, by key."""
        return self.build_with(name, live, lambda unit: self._fill(unit, wanted))

    def is_the_same(self, tensor: torch.Tensor) -> bool:
        """Whether what came for a source tensor after its unit was built is what it was built with."""
        kept = self._kept.get(id(tensor))
        if kept is None:
            return False
        again = kept.clone()
        self._recording.play(tensor, self._recording.stand_in(again, tensor))
        return torch.equal(kept, again)

    def _fill(self, unit: Unit, wanted: dict[str, torch.Tensor]) -> frozenset[str]:
        """Fill a unit that has memory with what was sent; returns the keys that were."""
        loaded = []
        for key, place in source_parameters(unit).items():
            tensor = wanted.get(key)
            if tensor is None or not self._recording.is_loaded(tensor):
                if key in self._shared:
                    place.data.copy_(self._shared[key])
                elif isinstance(place, nn.Parameter) or tensor is None:
                    self._fill_unsent(key, place)
                continue
            loaded.append(key)
            if not self._recording.coverage[id(tensor)].is_whole():
                self._fill_unsent(key, place)
            self._recording.play(tensor, self._recording.stand_in_place(place, tensor))
            if place.numel() <= _SMALL:
                self._kept[id(tensor)] = place.detach().clone()
        return frozenset(loaded)

    def _fill_unsent(self, key: str, place: torch.Tensor) -> None:
        """What no checkpoint fills holds what the constructor gave it, or zeros, as on a cold load."""
        initial = self._initial.get(key)
        if initial is not None and initial.shape == place.shape:
            place.data.copy_(initial)
        else:
            place.data.zero_()


class _Modules:
    """The modules of a twin's unit as they are before it is built, to load what comes late."""

    def __init__(self, unit: Unit) -> None:
        self._kept = []
        for module in unit.modules.values():
            state = dict(module.__dict__)
            for books in ("_parameters", "_buffers", "_non_persistent_buffers_set"):
                state[books] = type(state[books])(state[books])
            self._kept.append((module, state))

    def restore(self) -> None:
        """Put them back, which lets go of what was built."""
        for module, state in self._kept:
            module.__dict__.clear()
            module.__dict__.update(state)
