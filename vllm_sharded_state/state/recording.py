"""What a model's `load_weights` does with the tensors it is given, seen on a twin without memory.

The model's own `load_weights` runs on a twin on the meta device, so that nothing is copied. Each call of
a weight loader is kept, and each write past one; then what belongs to one parameter can be played again
on real memory. What loaders do on the side (sets of names they have seen) happens on the twin.
"""

import functools
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_map_only
from vllm.config import set_current_vllm_config
from vllm.model_executor.model_loader.weight_utils import default_weight_loader
from vllm.utils.torch_utils import set_default_torch_dtype

from .coverage import Coverage
from .twin import Twin

Call = tuple[Callable[..., Any], tuple[Any, ...], dict[str, Any]]
#: Told each call of a weight loader, or write past one, before it is made: the parameter and what
#: is loaded into it. It may raise.
Watcher = Callable[[torch.Tensor, list[torch.Tensor]], None]


class Recording:
    """The calls of weight loaders on `twin`, by parameter, for as many `run`s as there are.

    lost: ids of parameters that the model computes from other parameters while it loads; these can't
    be played again.
    coverage: by id of a parameter, which of its elements were written.
    stretched: parameters into which something of fewer elements was copied, repeated to fit.
    """

    def __init__(self, twin: Twin, watcher: Watcher | None = None) -> None:
        self.twin = twin
        self.lost: set[int] = set()
        self.coverage: dict[int, Coverage] = {}
        self.stretched: list[torch.Tensor] = []
        self._watcher = watcher
        self._calls: dict[int, list[Call]] = defaultdict(list)
        self._owned: dict[int, int] = {}
        self._originals: dict[int, Callable[..., Any]] = {}
        # By storage; held, so that ids stay those of these tensors.
        self._owners: dict[int, Any] = {
            t.untyped_storage()._cdata: t for t in _unique_tensors(twin.model)
        }
        for parameter in self._owners.values():
            self.coverage[id(parameter)] = Coverage(parameter)
            parameter.weight_loader = self._recorder(parameter)
        self._mode = _MetaWrites(self)

    def knows(self, parameter: torch.Tensor) -> bool:
        """Whether calls that load `parameter` are recorded: it has no memory, and can be loaded."""
        return id(parameter) in self.coverage

    def is_loaded(self, parameter: torch.Tensor) -> bool:
        """Whether anything is kept that was loaded into `parameter`."""
        return self.is_kept(id(parameter))

    def is_kept(self, parameter: int) -> bool:
        """Whether anything is kept that was loaded into the parameter of this id."""
        return bool(self._calls.get(parameter))

    def calls(self, parameter: torch.Tensor) -> int:
        """How many times something was loaded into `parameter` that is kept."""
        return len(self._calls.get(id(parameter), ()))

    def run(self, weights: Iterable[tuple[str, torch.Tensor]]) -> Any:
        """Give `weights` to the model's `load_weights`, and return what that returns.

        Raises what it raises, or the watcher.
        """
        config = self.twin.vllm_config
        with (
            torch.no_grad(),
            set_current_vllm_config(config),
            set_default_torch_dtype(config.model_config.dtype),
            self._mode,
        ):
            load: Any = self.twin.model.load_weights
            return load(weights)

    def own(self) -> None:
        """Copy the tensors of all calls that are kept, each on its device: their memory may be reused."""
        copies: dict[int, torch.Tensor] = {}

        def copy(tensor: torch.Tensor) -> torch.Tensor:
            if tensor.is_meta:  # the parameter itself
                return tensor
            return copies.setdefault(id(tensor), tensor.detach().clone())

        for parameter, calls in self._calls.items():
            first = self._owned.get(parameter, 0)
            calls[first:] = [tree_map_only(torch.Tensor, copy, call) for call in calls[first:]]
            self._owned[parameter] = len(calls)

    def forget(self, parameter: torch.Tensor) -> None:
        """Let go of what was loaded into `parameter`."""
        self._calls.pop(id(parameter), None)
        self._owned.pop(id(parameter), None)

    def play(self, parameter: torch.Tensor, place: torch.Tensor) -> None:
        """Load into `place`, a tensor of the form of `parameter`, what was loaded into `parameter`."""
        for loader, args, kwargs in self._calls.get(id(parameter), ()):
            args = tuple(place if arg is parameter else arg for arg in args)
            kwargs = {k: place if v is parameter else v for k, v in kwargs.items()}
            loader(*args, **kwargs)

    def play_twice(
        self, parameter: torch.Tensor, device: torch.device
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """A filled copy of `parameter`, and a mask of its elements that nothing wrote; those are zero.

        It is filled twice over different bytes: where the results differ, nothing wrote.
        """
        copies = []
        for byte in (0x00, 0xFF):
            with device:
                copy = torch.empty(parameter.shape, dtype=parameter.dtype)
            copy.view(-1).view(torch.uint8).fill_(byte)
            stand_in = self.stand_in(copy, parameter)
            self.play(parameter, stand_in)
            copies.append(stand_in.detach().as_subclass(torch.Tensor))
        first, second = copies
        width = first.element_size()
        pair = [c.contiguous().view(-1).view(torch.uint8).view(-1, width) for c in (first, second)]
        untouched = (pair[0] != pair[1]).any(dim=1).view(first.shape)
        return first, untouched

    def stand_in(self, copy: torch.Tensor, parameter: torch.Tensor) -> torch.Tensor:
        """`copy` under the class and attributes that `parameter`'s weight loaders look at."""
        return self.stand_in_place(copy.detach(), parameter)

    def stand_in_place(self, tensor: torch.Tensor, parameter: torch.Tensor) -> torch.Tensor:
        """`tensor` itself, given the class and attributes that `parameter`'s weight loaders look at."""
        stand_in: Any = tensor
        stand_in.__class__ = parameter.__class__
        stand_in.__dict__ = parameter.__dict__.copy()
        stand_in.weight_loader = self._originals[id(parameter)]
        return stand_in

    def _recorder(self, parameter: Any) -> Callable[..., Any]:
        original = _plain_loader(getattr(parameter, "weight_loader", default_weight_loader))
        self._originals[id(parameter)] = original

        @functools.wraps(original, assigned=("__doc__",), updated=())
        def record(*args: Any, **kwargs: Any) -> Any:
            if self._watcher is not None:
                loaded = [x for x in (*args, *kwargs.values()) if isinstance(x, torch.Tensor)]
                self._watcher(parameter, [x for x in loaded if x is not parameter])
            before = self._mode.writes
            with self._mode.paused():
                result = original(*args, **kwargs)
            if self._mode.writes != before:  # else it was for another rank, as experts are
                self._calls[id(parameter)].append((original, args, kwargs))
            return result

        return record

    def owner(self, tensor: torch.Tensor) -> torch.Tensor | None:
        """The parameter whose memory `tensor` would share."""
        return self._owners.get(tensor.untyped_storage()._cdata)

    def keep_write(self, owner: torch.Tensor, func: Any, args: Any, kwargs: Any) -> None:
        """Keep a write that a model makes without a weight loader, if it can be played again."""
        target, *rest = args
        others = [x for x in (*rest, *kwargs.values()) if isinstance(x, torch.Tensor)]
        if any(x.is_meta for x in others):
            self.lost.add(id(owner))
            return
        if self._watcher is not None:
            self._watcher(owner, others)
        form = (target.size(), target.stride(), target.storage_offset())

        def write(parameter: torch.Tensor, *rest: Any, **kwargs: Any) -> None:
            func(parameter.detach().as_strided(*form), *rest, **kwargs)

        self._calls[id(owner)].append((write, (owner, *rest), kwargs))


def _plain_loader(loader: Callable[..., Any]) -> Callable[..., Any]:
    """`loader` without upstream's wrapper that quantizes a layer as soon as its last weight has come.

    The wrapper is `make_online_process_loader` (model_loader/reload/layerwise.py).
    """
    while getattr(loader, "__name__", "") == "online_process_loader":
        loader = loader.__wrapped__  # type: ignore[attr-defined]
    return loader


_COPY = torch.ops.aten.copy_.default


class _MetaWrites(TorchDispatchMode):
    """Sees each write to a parameter of the twin: what it covers, and whether it passed a loader.

    writes: how many there were.
    """

    def __init__(self, recording: Recording) -> None:
        super().__init__()
        self.writes = 0
        self._recording = recording
        self._pauses = 0

    def paused(self) -> "_Pause":
        """Inside the block, writes are a weight loader's, whose call is kept already."""
        return _Pause(self)

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        if func._schema.is_mutable and args:
            target = args[0]
            if isinstance(target, torch.Tensor) and target.is_meta:
                owner = self._recording.owner(target)
                if owner is not None:
                    self.writes += 1
                    self._recording.coverage[id(owner)].note(func, target)
                    if func is _COPY and args[1].numel() != target.numel():
                        self._recording.stretched.append(owner)
                    if not self._pauses:
                        self._recording.keep_write(owner, func, args, kwargs or {})
        return func(*args, **(kwargs or {}))


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
