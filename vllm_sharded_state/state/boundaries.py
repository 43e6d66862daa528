"""Where the walk over a module's state stops, and why.

A model reaches its configuration, its process groups and the compiler's caches; none of them holds
weights. It also holds state of the *engine*, such as the KV cache, which belongs to no checkpoint.
"""

import logging
import re
import threading
import types
import weakref

import torch
from torch import nn
from vllm.compilation.wrapper import TorchCompileWithNoGuardsWrapper
from vllm.model_executor.layers.attention_layer_base import AttentionLayerBase

#: Attributes that `nn.Module` keeps for itself; loaders end with `eval()`, which sets `training`.
MODULE_INTERNALS = frozenset(nn.Module().__dict__)

#: What the engine binds to attention-like layers (vllm/v1/worker/utils.py, `bind_kv_cache`).
_KV_CACHE = frozenset({"kv_cache"})

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

#: Classes from these packages lead out of the model: configuration, communication, compilation.
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
)

#: Instances of these types hold no weights.
INERT_TYPES = (
    type,
    types.ModuleType,
    types.BuiltinFunctionType,
    types.WrapperDescriptorType,
    types.MethodDescriptorType,
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
    weakref.ref,
    torch.device,
    torch.Generator,
    torch.finfo,
    torch.iinfo,
    torch._ops.OpOverload,
    torch._ops.OpOverloadPacket,
)

#: Classes whose instances own memory that only native code can read (vllm/_custom_ops.py).
NATIVE_HANDLES = frozenset({"CPUDNNLGEMMHandler"})


def skipped_attributes(module: nn.Module) -> frozenset[str]:
    """Attributes of `module` that hold no weights: torch's own, the engine's and the compiler's."""
    skipped = MODULE_INTERNALS
    if isinstance(module, AttentionLayerBase):
        skipped |= _KV_CACHE
    if isinstance(module, TorchCompileWithNoGuardsWrapper):
        skipped |= _COMPILER
    return skipped


def leads_outside(value: object) -> bool:
    """Whether `value` belongs to configuration, communication or compilation, not to weights."""
    if isinstance(value, INERT_TYPES):
        return True
    cls = type(value)
    return f"{cls.__module__}.".startswith(FOREIGN_PACKAGES)


def is_native_handle(value: object) -> bool:
    """Whether `value` owns memory that Python cannot see into.

    True for the known handle classes, and for instances of any class that was not written in Python:
    capsules, TorchScript objects, `ctypes` and pybind11 objects.
    """
    cls = type(value)
    if cls.__name__ in NATIVE_HANDLES:
        return True
    if isinstance(value, torch.ScriptObject):
        return True
    is_heap_type = bool(cls.__flags__ & (1 << 9))
    return not is_heap_type or type(cls).__name__ == "pybind11_type"
