"""Read the source tensors of single modules from the model's own checkpoint again.

The model's `load_weights` runs once on a twin on the meta device, with the checkpoint's tensors as
views of memory-mapped files, so that nothing is copied. Each call of a weight loader is kept, and each
write past one. Then what belongs to one module is played again on real memory, a module at a time.
What loaders do on the side (sets of names they have seen) happens on the twin, and is recorded too.
"""

import functools
from collections import defaultdict
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode
from vllm.config import set_current_vllm_config
from vllm.logger import init_logger
from vllm.model_executor.model_loader import get_model_loader
from vllm.model_executor.model_loader.weight_utils import default_weight_loader
from vllm.utils.torch_utils import set_default_torch_dtype

from vllm_sharded_state.errors import NoSourceError

from . import plain
from .twin import Twin, source_parameters
from .units import Unit
from .walk import Kind

logger = init_logger("vllm.sharded_state.source")

Call = tuple[Callable[..., Any], tuple[Any, ...], dict[str, Any]]


class SourceReader:
    """The source tensors of a model, module by module, from the checkpoint it was loaded from.

    Raises `NoSourceError` when the load format has no checkpoint, or the model's own `load_weights`
    cannot run on a twin.
    """

    def __init__(self, twin: Twin, initial: dict[str, torch.Tensor]) -> None:
        self._twin = twin
        self._initial = initial
        self._calls: dict[int, list[Call]] = defaultdict(list)
        self._originals: dict[int, Callable[..., Any]] = {}
        self._lost: set[int] = set()
        before = {name: _plain_values(twin, unit) for name, unit in twin.units.items()}
        self._record()
        self._side_effects = {
            name: {
                path: value
                for path, value in _plain_values(twin, unit).items()
                if not plain.equal(value, before[name].get(path))
            }
            for name, unit in twin.units.items()
        }

    def side_effects(self, unit: str) -> dict[str, object]:
        """Python values, by path, that the weight loaders set on the modules of `unit`."""
        return self._side_effects[unit]

    def read(self, unit: str, device: torch.device) -> tuple[dict[str, torch.Tensor], list[str]]:
        """The source tensors of `unit` by `state_dict()` key, on `device`, filled by its loaders.

        Also returns the keys of which some elements came from neither checkpoint nor constructor;
        those elements are zero.
        """
        tensors: dict[str, torch.Tensor] = {}
        incomplete: list[str] = []
        for key, parameter in source_parameters(self._twin.units[unit]).items():
            if id(parameter) in self._lost:
                raise NoSourceError(
                    f"{key} is computed from other weights by the model itself, while it loads.\n"
                    "Save it in runtime layout: VSS_LAYOUT=runtime."
                )
            filled, untouched = self._play(parameter, device)
            if bool(untouched.any()):
                initial = self._initial.get(key)
                if initial is not None and initial.shape == filled.shape:
                    filled.view(-1)[untouched.view(-1)] = initial.to(device, filled.dtype).view(-1)[
                        untouched.view(-1)
                    ]
                else:
                    incomplete.append(key)
            tensors[key] = filled
        return tensors, incomplete

    def _play(
        self, parameter: torch.Tensor, device: torch.device
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Fill a copy of `parameter` twice over different bytes; where they differ, nothing wrote."""
        copies = []
        for byte in (0x00, 0xFF):
            with device:
                copy = torch.empty(parameter.shape, dtype=parameter.dtype)
            copy.view(-1).view(torch.uint8).fill_(byte)
            stand_in = self._stand_in(copy, parameter)
            for loader, args, kwargs in self._calls.get(id(parameter), ()):
                args = tuple(stand_in if arg is parameter else arg for arg in args)
                kwargs = {k: stand_in if v is parameter else v for k, v in kwargs.items()}
                loader(*args, **kwargs)
            copies.append(stand_in.detach().as_subclass(torch.Tensor))
        first, second = copies
        width = first.element_size()
        pair = [c.view(-1).view(torch.uint8).view(-1, width) for c in (first, second)]
        untouched = (pair[0] != pair[1]).any(dim=1).view(first.shape)
        return first, untouched

    def _stand_in(self, copy: torch.Tensor, parameter: torch.Tensor) -> torch.Tensor:
        """`copy` under the class and attributes that `parameter`'s weight loaders look at."""
        stand_in: Any = copy.detach()
        stand_in.__class__ = parameter.__class__
        stand_in.__dict__ = parameter.__dict__.copy()
        if id(parameter) in self._originals:
            stand_in.weight_loader = self._originals[id(parameter)]
        return stand_in

    def _record(self) -> None:
        """Run the model's `load_weights` on the twin, keeping each call of a weight loader."""
        config = self._twin.vllm_config
        loader = get_model_loader(config.load_config)
        if not hasattr(loader, "get_all_weights"):
            raise NoSourceError(
                f"load format {config.load_config.load_format!r} has no checkpoint to read again, "
                "and weights were packed away when the model was loaded.\n"
                "Start the engine from the model's checkpoint, and save from there."
            )
        model = self._twin.model
        for parameter in _unique_tensors(model):
            parameter.weight_loader = self._recorder(parameter)
        watch = _MetaWrites(
            {t.untyped_storage()._cdata: t for t in _unique_tensors(model)}, self._keep_write
        )
        with (
            torch.no_grad(),
            set_current_vllm_config(config),
            set_default_torch_dtype(config.model_config.dtype),
            watch,
        ):
            self._watch = watch
            load: Any = model.load_weights
            load(loader.get_all_weights(config.model_config, model))
        self._lost = watch.lost

    def _keep_write(self, parameter: torch.Tensor, write: Callable[[torch.Tensor], Any]) -> None:
        self._calls[id(parameter)].append((write, (parameter,), {}))

    def _recorder(self, parameter: Any) -> Callable[..., Any]:
        original = getattr(parameter, "weight_loader", default_weight_loader)
        self._originals[id(parameter)] = original

        @functools.wraps(original, assigned=("__doc__",), updated=())
        def record(*args: Any, **kwargs: Any) -> Any:
            self._calls[id(parameter)].append((original, args, kwargs))
            with self._watch.paused():
                return original(*args, **kwargs)

        return record


class _MetaWrites(TorchDispatchMode):
    """Sees twin parameters that a model writes without a weight loader, and keeps those writes too.

    `repeat(parameter, write)` is told each write that can be played again on real memory; what was
    computed from other twin parameters can't be, and is noted in `lost`.
    """

    def __init__(
        self,
        owners: dict[int, torch.Tensor],
        repeat: Callable[[torch.Tensor, Callable[[torch.Tensor], Any]], None],
    ) -> None:
        super().__init__()
        self._owners = owners
        self._repeat = repeat
        self._pauses = 0
        self.lost: set[int] = set()

    def paused(self) -> "_Pause":
        return _Pause(self)

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        if not self._pauses and func._schema.is_mutable and args:
            target = args[0]
            if isinstance(target, torch.Tensor) and target.is_meta:
                owner = self._owners.get(target.untyped_storage()._cdata)
                if owner is not None:
                    self._note(owner, func, args, kwargs or {})
        return func(*args, **(kwargs or {}))

    def _note(self, owner: torch.Tensor, func: Any, args: Any, kwargs: Any) -> None:
        target, *rest = args
        others = [x for x in (*rest, *kwargs.values()) if isinstance(x, torch.Tensor)]
        if any(x.is_meta for x in others):
            self.lost.add(id(owner))
            return
        form = (target.size(), target.stride(), target.storage_offset())

        def write(parameter: torch.Tensor) -> None:
            func(parameter.detach().as_strided(*form), *rest, **kwargs)

        self._repeat(owner, write)


class _Pause:
    def __init__(self, mode: _MetaWrites) -> None:
        self._mode = mode

    def __enter__(self) -> None:
        self._mode._pauses += 1

    def __exit__(self, *exc: object) -> None:
        self._mode._pauses -= 1


def _unique_tensors(model: nn.Module) -> Iterator[Any]:
    seen: set[int] = set()
    for module in model.modules():
        for tensor in (*module._parameters.values(), *module._buffers.values()):
            if tensor is not None and tensor.is_meta and id(tensor) not in seen:
                seen.add(id(tensor))
                yield tensor


def _plain_values(twin: Twin, unit: Unit) -> dict[str, object]:
    return {
        path: leaf.value
        for path, leaf in twin.leaves(unit).items()
        if leaf.kind is Kind.VALUE and plain.is_restorable(leaf.value)
    }
