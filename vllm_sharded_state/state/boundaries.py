"""Where the walk over a module's state stops, and why.

A model reaches its configuration, its process groups and the compiler's caches; none of them holds
weights. It also holds state of the *engine*, such as the KV cache, which belongs to no checkpoint.
"""

import functools
import logging
import re
import threading
import types
from collections import OrderedDict, defaultdict, deque

import torch
from torch import nn
from vllm.compilation.wrapper import TorchCompileWithNoGuardsWrapper
from vllm.model_executor.layers.attention_layer_base import AttentionLayerBase

#: Attributes that `nn.Module` keeps for itself; loaders end with `eval()`, which sets `training`.
MODULE_INTERNALS = frozenset(nn.Module().__dict__)

#: What the engine binds to attention-like layers at every start: the cache (vllm/v1/worker/utils.py,
#: `bind_kv_cache`), and the CPU's instruction set (vllm/v1/attention/backends/cpu_attn.py).
_BOUND = frozenset({"kv_cache", "isa"})

#: What the compiler keeps on a model (vllm/compilation/decorators.py and wrapper.py).
_COMPILER = frozenset(
    {
        "_aot_cache_dir",
        "_aot_compilation_path",
        "_bytecode_hook_handle",
        "_compile_prefix",
        "_compile_tag",
        "_compiled_bytecode",
        "_compiled_callable",
        "_dynamic_arg_dims",
        "_is_encoder",
        "aot_compile",
        "aot_compiled_fn",
        "compilation_config",
        "compiled",
        "do_not_compile",
        "evaluate_guards",
        "first_compile",
        "layerwise_nvtx_tracing_enabled",
        "vllm_config",
        "was_aot_compile_fn_loaded_from_disk",
    }
)

#: Classes from these packages lead out of the model: configuration, communication, compilation, and what
#: this package puts on a model while it takes new weights.
FOREIGN_PACKAGES = (
    "asyncio.",
    "concurrent.",
    "logging.",
    "multiprocessing.",
    "torch._dynamo.",
    "torch._inductor.",
    "torch._C._distributed",
    "torch.distributed.",
    "torch.fx.",
    "transformers.",
    "triton.",
    "vllm.compilation.",
    "vllm.config.",
    "vllm.distributed.",
    "vllm.lora.",
    "vllm.transformers_utils.",
    "vllm_sharded_state.",
)

#: Classes and functions without state: which one it is can follow from weights.
CHOICES = (
    type,
    types.BuiltinFunctionType,
    types.WrapperDescriptorType,
    types.MethodDescriptorType,
    torch._ops.OpOverload,
    torch._ops.OpOverloadPacket,
)

#: Instances of these types hold no weights.
INERT_TYPES = (
    types.ModuleType,
    types.GenericAlias,
    re.Pattern,
    range,
    slice,
    property,
    type(Ellipsis),
    type(NotImplemented),
    type(threading.Lock()),
    type(threading.RLock()),
    logging.Logger,
    torch.device,
    torch.Generator,
    torch.finfo,
    torch.iinfo,
)

#: Classes whose instances own memory that only native code can read (vllm/_custom_ops.py).
NATIVE_HANDLES = frozenset({"CPUDNNLGEMMHandler"})


def skipped_attributes(module: nn.Module) -> frozenset[str]:
    """Attributes of `module` that hold no weights: torch's own, the engine's and the compiler's."""
    skipped = MODULE_INTERNALS
    if isinstance(module, AttentionLayerBase):
        skipped |= _BOUND
    if isinstance(module, TorchCompileWithNoGuardsWrapper):
        skipped |= _COMPILER
    return skipped


#: Attributes of a parameter that say how to fill it (vllm/model_executor/parameter.py).
_LOADING = frozenset({"weight_loader", "_weight_loader"})

#: How long something took (vllm/model_executor/layers/quantization/online/base.py).
_TIMES = frozenset({"online_quantization_time"})


def is_aside(value: object, name: str) -> bool:
    """Whether attribute `name` of an object that is no module tells about work, not about weights.

    On tensors the compiler leaves marks of its own, as `_dynamo_static_input_type`.
    """
    if isinstance(value, torch.Tensor):
        return name in _LOADING or name.startswith("_dynamo_")
    return name in _TIMES


def leads_outside(value: object) -> bool:
    """Whether `value` belongs to configuration, communication or compilation, not to weights."""
    if isinstance(value, INERT_TYPES):
        return True
    if isinstance(value, nn.Module):
        return False
    cls = type(value)
    return f"{cls.__module__}.".startswith(FOREIGN_PACKAGES)


def is_native_handle(value: object) -> bool:
    """Whether `value` owns memory that Python cannot see into.

    True for the known handle classes, and for instances of any class that holds more than what Python
    put there: capsules, TorchScript objects, `ctypes`, `array` and pybind11 objects.
    """
    cls = type(value)
    if cls.__name__ in NATIVE_HANDLES or isinstance(value, torch.ScriptObject):
        return True
    if cls is object:
        return False
    foreign = [c for c in cls.__mro__ if not is_own(c)]
    if not set(foreign) <= _TRANSPARENT:
        return True
    slots = sum(
        isinstance(member, types.MemberDescriptorType)
        for c in cls.__mro__
        if is_own(c)
        for member in vars(c).values()
    )
    # A class that C code made has room beyond its base, its slots, `__dict__` and `__weakref__`.
    room = max(c.__basicsize__ for c in foreign) + 8 * (slots + 2)
    return cls.__basicsize__ > room


#: Classes of the interpreter whose content the walk reads.
_TRANSPARENT = {object, dict, list, tuple, set, frozenset, deque, functools.partial} | {
    OrderedDict,
    defaultdict,
    BaseException,
    Exception,
    types.SimpleNamespace,
    types.FunctionType,
    types.MethodType,
    types.MappingProxyType,
}


def is_own(cls: type) -> bool:
    """Whether `cls` was made by a class statement: such classes can be changed, the interpreter's not."""
    is_heap_type, is_immutable = bool(cls.__flags__ & (1 << 9)), bool(cls.__flags__ & (1 << 8))
    return is_heap_type and not is_immutable and type(cls).__module__ not in ("_ctypes",)


def may_hold_weights(value: object) -> bool:
    """Whether an opaque object that a constructor made could still be filled with weights later.

    Locks, streams, events and the handles of libraries that vLLM builds on hold none.
    """
    return type(value).__module__.partition(".")[0] not in _LIBRARIES


def holds_weights(value: object) -> bool:
    """Whether an opaque object of a processed unit is to be taken for the holder of its weights."""
    known = type(value).__name__ in NATIVE_HANDLES or isinstance(value, torch.Tensor)
    return known or may_hold_weights(value)


_LIBRARIES = frozenset(
    {"_thread", "threading", "torch", "vllm", "cuda", "flashinfer", "pybind11_builtins", "nanobind"}
)
