"""KV scales of attention layers as state that can be updated by itself.

A scale that is sent passes the weight loader of its parameter (any callable, tensor parallel slices and
the reduction of q included) and upstream's own KV-cache method, on a copy of the layer; its buffer, its
float and its host tensor then take the place of the old ones. A scale that is not sent keeps its value.
"""

import math
from collections import defaultdict
from collections.abc import Callable, Mapping
from typing import Any
from weakref import WeakSet

import torch
from torch import nn
from vllm.config import set_current_vllm_config
from vllm.logger import init_logger
from vllm.model_executor.layers.quantization.kv_cache import (
    BaseKVCacheMethod,
    KVCacheScaleParameter,
)
from vllm.model_executor.model_loader.weight_utils import maybe_remap_kv_scale_name
from vllm.utils.torch_utils import is_quantized_kv_cache, set_default_torch_dtype

from vllm_sharded_state.errors import (
    ReloadInPlaceError,
    ReloadMismatchError,
    ReloadScaleError,
    ReloadUnexpectedError,
)
from vllm_sharded_state.state import plain
from vllm_sharded_state.state.construction import Construction
from vllm_sharded_state.state.kernels import same_bits
from vllm_sharded_state.state.kv_scales import KINDS, KINDS_WITH_HOST_TENSOR
from vllm_sharded_state.state.recording import Recording
from vllm_sharded_state.state.twin import Twin
from vllm_sharded_state.state.units import Unit
from vllm_sharded_state.state.walk import join

from .undo import UndoLog
from .validate import refuse_bad_values

logger = init_logger("vllm.sharded_state.reload")

#: Models that were filled with random values, and have had their KV scales set since.
_settled: "WeakSet[nn.Module]" = WeakSet()

_SUFFIXES = ("scale", "zero_point")
#: What attention backends make of the floats when they first run, each None until then
#: (vllm/v1/attention/backends/flashinfer.py, mla/flashinfer_mla*.py, mla/tokenspeed_mla.py).
_BAKED = ("bmm1_scale", "bmm2_scale", "softmax_scale", "output_scale")


class KvScales:
    """The scales of all attention layers of a model: those that were sent, and those that stay.

    by_parameter: for each parameter of the twin that holds a scale (or a zero point, which vLLM does not
    read), by id: the attention layer's unit and the kind (`q`, `k`, `v`, `prob`).
    """

    def __init__(
        self, twin: Twin, live: Mapping[str, Unit], model: nn.Module, construction: Construction
    ) -> None:
        self.by_parameter: dict[int, tuple[str, str]] = {}
        self._twin = twin
        self._live = live
        self._model = model
        self._construction = construction
        self._sent: dict[str, set[str]] = defaultdict(set)
        self._fused: set[str] = set()
        self._parameters: dict[tuple[str, str], Any] = {}
        load_format = construction.vllm_config.load_config.load_format
        self._are_random = load_format == "dummy" and model not in _settled
        for name, unit in twin.units.items():
            self._prepare(name, unit.root)
        self._names = dict(twin.model.named_parameters())

    def _prepare(self, name: str, root: nn.Module) -> None:
        """Find the scale parameters of an attention layer, or give it some that can be loaded."""
        if not isinstance(getattr(root, "_k_scale", None), torch.Tensor):
            return
        layer: Any = root
        has_method = isinstance(getattr(layer, "quant_method", None), BaseKVCacheMethod)
        if not has_method and not is_quantized_kv_cache(layer.kv_cache_dtype):
            return
        for kind in KINDS:
            if not has_method:
                with torch.device("meta"):
                    setattr(layer, f"{kind}_scale", KVCacheScaleParameter())
            for suffix in _SUFFIXES:
                parameter = layer._parameters.get(f"{kind}_{suffix}")
                if parameter is not None:
                    self.by_parameter[id(parameter)] = (name, kind)
                    self._parameters[name, f"{kind}_{suffix}"] = parameter

    def rename(self, name: str) -> str:
        """The name under which the model's `load_weights` takes what was sent as `name`.

        Where a model has a quantization config, its own `load_weights` renames scales; where it has
        none, upstream's function for that is called here.
        """
        if self._twin.vllm_config.quant_config is not None or "scale" not in name:
            return name
        return maybe_remap_kv_scale_name(name, self._names) or name

    def accept(self, parameter: torch.Tensor, loaded: list[torch.Tensor], name: str) -> None:
        """Check a scale that is sent, and note it.

        Raises:
            ReloadScaleError: it is not finite, or not positive.
            ReloadMismatchError: it has another number of elements than the layer has scales.
            ReloadUnexpectedError: the layer was sent this scale already, under another name.
        """
        unit, kind = self.by_parameter[id(parameter)]
        if self._parameters.get((unit, f"{kind}_scale")) is not parameter:
            return  # a zero point
        for tensor in loaded:
            refuse_bad_values(tensor, name, zero=False)
            wanted = self._wanted(unit, kind, parameter)
            if tensor.numel() != wanted:
                raise ReloadMismatchError(
                    f"{name} has {tensor.numel()} scales, and {join(unit, f'{kind}_scale')} takes "
                    f"{wanted}."
                )
        if kind in self._sent[unit]:
            raise ReloadUnexpectedError(f"{name}: {unit} was sent its {kind} scale already.")
        self._sent[unit].add(kind)
        if name.endswith(".kv_scale"):
            self._fused.add(unit)

    def _wanted(self, unit: str, kind: str, parameter: torch.Tensor) -> int:
        """How many scales a checkpoint holds for all ranks: one a tensor, or one a head."""
        if parameter.dim() == 0:
            return 1
        layer: Any = self._twin.units[unit].root
        scheme = getattr(layer.quant_method.quant_config, "kv_cache_scheme", None)
        if scheme is None or scheme.get("strategy") != "attn_head":
            return parameter.numel()
        config = layer.quant_method.quant_config
        return int(config.total_num_heads if kind == "q" else config.total_num_kv_heads)

    def place_all(
        self, recording: Recording, undo: UndoLog, placed: Callable[[str, bool], None]
    ) -> None:
        """Put every scale that was sent in its place; `placed` is told each unit, and if it is new.

        Raises:
            ReloadScaleError: upstream's method made something of it that is no scale.
            ReloadInPlaceError: it can't be put where the old one lies.
        """
        for unit in sorted({unit for unit, _ in self.by_parameter.values()}):
            kinds = set(self._sent.get(unit, ()))
            if unit in self._fused:
                kinds.add("v")  # upstream's method takes the one scale for both
            if self._are_random:
                kinds = set(KINDS)  # the buffers were filled at random too
            if kinds:
                placed(unit, self._place(unit, kinds, recording, undo))

    def log_kept(self) -> None:
        """Say which layers were sent some of their scales and keep others; call it when all is done."""
        partly = {
            unit: sorted(k for k in KINDS if self._has(unit, k) and k not in kinds)
            for unit, kinds in self._sent.items()
            if kinds and unit not in self._fused
        }
        for kept in sorted({tuple(kinds) for kinds in partly.values() if kinds}):
            units = sorted(unit for unit, kinds in partly.items() if tuple(kinds) == kept)
            logger.info(
                "KV scales that were not sent keep their values: %s of %d layers (%s, ...)",
                ", ".join(kept),
                len(units),
                units[0],
            )

    def settle(self) -> None:
        """The model's scales are no longer random."""
        settle(self._model)

    def _has(self, unit: str, kind: str) -> bool:
        return (unit, f"{kind}_scale") in self._parameters

    def _place(self, unit: str, kinds: set[str], recording: Recording, undo: UndoLog) -> bool:
        layer = self._process(unit, recording)
        live: Any = self._live[unit].root
        changed = False
        for kind in sorted(kinds):
            new = getattr(layer, f"_{kind}_scale")
            refuse_bad_values(new, join(unit, f"_{kind}_scale"), zero=False)
            changed |= self._fill(live, unit, f"_{kind}_scale", new, undo)
            value = getattr(layer, f"_{kind}_scale_float")
            if not (isinstance(value, float) and math.isfinite(value) and value > 0):
                raise ReloadScaleError(f"{unit}._{kind}_scale_float would be {value}.")
            changed |= not plain.equal(getattr(live, f"_{kind}_scale_float"), value)
            _assign(live, f"_{kind}_scale_float", value, undo)
            if kind in KINDS_WITH_HOST_TENSOR:
                name = f"_{kind}_scale_cpu"
                changed |= self._fill(live, unit, name, getattr(layer, name), undo)
        forget_baked(live, unit, self._construction.vllm_config, undo)
        return changed

    def _fill(self, live: Any, unit: str, name: str, new: torch.Tensor, undo: UndoLog) -> bool:
        old = getattr(live, name)
        if old.shape != new.shape or old.dtype != new.dtype:
            raise ReloadInPlaceError(
                f"{unit}.{name} is {tuple(old.shape)} in the running model and would become "
                f"{tuple(new.shape)}. Start the engine anew from a checkpoint with these scales."
            )
        changed = not same_bits(old, new)
        undo.keep_tensor(old)
        old.data.copy_(new)
        return changed

    def _process(self, unit: str, recording: Recording) -> nn.Module:
        """A copy of the attention layer with its new scales, processed by upstream's own method."""
        root = self._twin.units[unit].root
        live: Any = self._live[unit].root
        layer: Any = root.__new__(type(root))
        layer.__dict__ = dict(root.__dict__)
        for books in ("_parameters", "_buffers", "_non_persistent_buffers_set"):
            layer.__dict__[books] = type(root.__dict__[books])(root.__dict__[books])
        device = live._k_scale.device
        for kind in KINDS:
            one = torch.ones((), dtype=torch.float32, device=device)
            layer._buffers[f"_{kind}_scale"] = one
            setattr(layer, f"_{kind}_scale_float", 1.0)
            if kind in KINDS_WITH_HOST_TENSOR:
                setattr(layer, f"_{kind}_scale_cpu", torch.ones((), dtype=torch.float32))
            for suffix in _SUFFIXES:
                parameter = layer._parameters.get(f"{kind}_{suffix}")
                if parameter is not None:
                    layer._parameters[f"{kind}_{suffix}"] = self._filled(
                        unit, kind, suffix, parameter, recording, device
                    )
        config = self._twin.vllm_config
        method = getattr(root, "quant_method", None)
        if not isinstance(method, BaseKVCacheMethod):
            method = BaseKVCacheMethod(config.quant_config)
        with (
            torch.no_grad(),
            set_current_vllm_config(config),
            set_default_torch_dtype(config.model_config.dtype),
        ):
            method.process_weights_after_loading(layer)
        return layer

    def _filled(
        self,
        unit: str,
        kind: str,
        suffix: str,
        parameter: torch.Tensor,
        recording: Recording,
        device: torch.device,
    ) -> nn.Parameter:
        """The parameter as it was sent; else from the live buffer; else as the constructor made it."""
        with device:
            memory = torch.zeros(parameter.shape, dtype=parameter.dtype)
        live = getattr(self._live[unit].root, f"_{kind}_scale")
        initial = self._construction.initial.get(join(unit, f"{kind}_{suffix}"))
        duplicates = unit in self._fused and kind == "v"
        if suffix == "scale" and not self._are_random and not duplicates:
            if live.numel() == memory.numel():
                memory.copy_(live.reshape(memory.shape))
        elif initial is not None:
            memory.copy_(initial.reshape(memory.shape))
        elif suffix == "scale":
            memory.fill_(-1.0)  # upstream's sign that no scale was loaded
        if recording.is_loaded(parameter):
            recording.play(parameter, recording.stand_in(memory, parameter))
        return nn.Parameter(memory, requires_grad=False)


def paths(unit: str) -> set[str]:
    """The paths of everything about scales that an attention layer holds, when processed or not."""
    names = {f"{kind}_{suffix}" for kind in KINDS for suffix in _SUFFIXES}
    names |= {f"_{k}_scale{end}" for k in KINDS for end in ("", "_float", "_cpu")}
    found = {join(unit, name) for name in names}
    return found | {f"{path}.<class>" for path in found}


def settle(model: nn.Module) -> None:
    """Note that the KV scales of `model` are no longer random."""
    _settled.add(model)


def forget_baked(live: Any, unit: str, vllm_config: Any, undo: UndoLog) -> None:
    """Let the backend compute anew what it made of the old floats when it first ran.

    Raises `ReloadInPlaceError` where captured graphs or fused kernels keep them.
    """
    impl = getattr(live, "impl", None)
    names = [n for n in _BAKED if getattr(impl, n, None) is not None]
    if not names:
        return
    if not vllm_config.model_config.enforce_eager or live._o_scale_float is not None:
        raise ReloadInPlaceError(
            f"{unit}: its backend ({type(impl).__name__}) took the KV scales into captured graphs "
            "or fused kernels when it first ran.\nStart the engine with enforce_eager=True to "
            "update KV scales, or start it anew from a checkpoint that holds them."
        )
    for name in names:
        _assign(impl, name, None, undo)


def _assign(owner: Any, name: str, value: Any, undo: UndoLog) -> None:
    undo.keep_value(lambda old: setattr(owner, name, old), getattr(owner, name))
    setattr(owner, name, value)
