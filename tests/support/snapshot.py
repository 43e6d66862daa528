"""Everything that a loaded model holds, by path: tensors as hashes, numbers as they are, kernels run.

Written apart from the product and sharing none of its code, so that what the product's own walk
overlooks shows up here as a difference. A snapshot is plain JSON:

- `tensors`: path -> {"dtype", "shape", "sha256" of the bytes in logical order, "nan"}
- `numbers`: path -> bool, int or float (floats as `float.hex`, so that they compare exactly)
- `shared`: lists of paths that are views of the same bytes (same address, shape and dtype)
- `kernels`: path -> sha256 of what the module's own kernel makes of a fixed random input

Paths are module names, then attributes; `[i]` is an item, `<cell name>` a closure's variable, `<arg>`
an argument of a functools.partial.
"""

import dataclasses
import functools
import hashlib
import re
import types
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch
from torch import nn

from tests.support.kernels import run_kernels

#: Attributes that are no state of the model: the KV cache, and torch's own books on a module.
SKIPPED_ATTRIBUTES = frozenset(
    {
        "kv_cache",
        "_parameters",
        "_buffers",
        "_modules",
        "_non_persistent_buffers_set",
        "_is_full_backward_hook",
        "training",
        # Time a process took, not what it holds.
        "online_quantization_time",
    }
)
#: Classes, by module and name, whose insides differ between processes or are no part of the model.
SKIPPED_CLASSES = re.compile(
    r"""
    vllm\.config\.|vllm\.distributed\.|vllm\.logger|vllm\.envs|vllm\.platforms\.|vllm\.transformers_utils\.
    |transformers\.|torch\.distributed|logging\.|threading\.|_thread|asyncio\.|weakref|pathlib\.|enum\.
    |re\.|regex\.|concurrent\.|multiprocessing\.|abc\.|vllm\.compilation\.
    |vllm\.lora\.punica_wrapper\.  # scratch that each step overwrites, uninitialized before the first
    |vllm\._custom_ops\.CPUDNNLGEMMHandler  # a native handle: its kernel is run instead
    |torch\._ops|torch\._C|torch\.library
    |vllm_sharded_state\.  # what stands for load_weights during an update
    """,
    re.VERBOSE,
)
NUMBERS = (bool, int, float)


def digest(tensor: torch.Tensor) -> dict[str, Any]:
    """dtype, shape, hash of the bytes and whether a NaN is among them."""
    entry: dict[str, Any] = {"dtype": str(tensor.dtype), "shape": list(tensor.shape)}
    if tensor.is_meta:
        return entry | {"sha256": "meta", "nan": False}
    flat = tensor.detach().reshape(-1).contiguous().cpu()
    raw = flat.view(torch.uint8).numpy().tobytes() if flat.numel() else b""
    nan = flat.is_floating_point() and bool(torch.isnan(flat.float()).any())
    return entry | {"sha256": hashlib.sha256(raw).hexdigest(), "nan": nan}


def _number(value: bool | int | float) -> bool | int | str:
    return value.hex() if isinstance(value, float) else value


class Walk:
    def __init__(self) -> None:
        self.tensors: dict[str, dict[str, Any]] = {}
        self.numbers: dict[str, bool | int | str] = {}
        self.places: dict[tuple[Any, ...], list[str]] = {}
        self._seen: dict[int, Any] = {}

    def model(self, model: nn.Module) -> None:
        modules = dict(model.named_modules())
        # Modules are walked under their own names: mark them so that no attribute is a detour.
        for module in modules.values():
            self._seen[id(module)] = module
        for name, module in modules.items():
            prefix = f"{name}." if name else ""
            for kind in (module._parameters, module._buffers):
                for key, tensor in kind.items():
                    if tensor is not None:
                        self.value(f"{prefix}{key}", tensor)
            self._attributes(prefix, vars(module))

    def _attributes(self, prefix: str, attributes: Mapping[str, Any]) -> None:
        for key, value in attributes.items():
            if key not in SKIPPED_ATTRIBUTES and not key.endswith("_hooks"):
                self.value(f"{prefix}{key}", value)

    def value(self, path: str, value: Any) -> None:
        if isinstance(value, torch.Tensor):
            self._tensor(path, value)
        elif isinstance(value, NUMBERS):
            self.numbers[path] = _number(value)
        elif value is None or isinstance(value, str | bytes | type | types.ModuleType):
            return
        elif id(value) not in self._seen:
            self._seen[id(value)] = value  # Held, so that no later object gets the same id.
            for step, inner in self._inside(value):
                self.value(f"{path}{step}", inner)

    def _tensor(self, path: str, tensor: torch.Tensor) -> None:
        self.tensors[path] = digest(tensor)
        if tensor.numel() and not tensor.is_meta:
            place = (tensor.data_ptr(), tuple(tensor.shape), str(tensor.dtype))
            self.places.setdefault(place, []).append(path)
        if id(tensor) in self._seen:
            return
        self._seen[id(tensor)] = tensor
        for key, value in vars(tensor).items():
            # Only tensors: the rest are loaders and axes, which nothing reads after loading.
            if isinstance(value, torch.Tensor):
                self._tensor(f"{path}.{key}", value)

    def _inside(self, value: Any) -> Iterator[tuple[str, Any]]:
        if isinstance(value, Mapping):
            yield from ((f"[{key!r}]", item) for key, item in value.items() if _plain(key))
        elif isinstance(value, list | tuple):
            yield from ((f"[{index}]", item) for index, item in enumerate(value))
        elif isinstance(value, functools.partial):
            yield "<function>", value.func
            yield from ((f"<{index}>", item) for index, item in enumerate(value.args))
            yield from ((f"<{key}>", item) for key, item in value.keywords.items())
        elif isinstance(value, types.MethodType):
            yield "<self>", value.__self__
            yield from self._function(value.__func__)
        elif isinstance(value, types.FunctionType):
            yield from self._function(value)
        else:
            yield from self._object(value)

    @staticmethod
    def _function(function: Callable[..., Any]) -> Iterator[tuple[str, Any]]:
        if not isinstance(function, types.FunctionType):
            return
        for name, cell in zip(
            function.__code__.co_freevars, function.__closure__ or (), strict=True
        ):
            try:
                yield f"<cell {name}>", cell.cell_contents
            except ValueError:  # A cell that was never filled.
                continue
        for index, value in enumerate(function.__defaults__ or ()):
            yield f"<default {index}>", value
        for name, value in (function.__kwdefaults__ or {}).items():
            yield f"<default {name}>", value

    @staticmethod
    def _object(value: Any) -> Iterator[tuple[str, Any]]:
        cls = type(value)
        if SKIPPED_CLASSES.match(f"{cls.__module__}.{cls.__qualname__}"):
            return
        attributes: dict[str, Any] = dict(getattr(value, "__dict__", {}))
        for base in cls.__mro__:
            slots = base.__dict__.get("__slots__", ())
            for slot in (slots,) if isinstance(slots, str) else slots:
                if hasattr(value, slot):
                    attributes.setdefault(slot, getattr(value, slot))
        if dataclasses.is_dataclass(value):
            for item in dataclasses.fields(value):
                if hasattr(value, item.name):
                    attributes.setdefault(item.name, getattr(value, item.name))
        for key, item in attributes.items():
            if key not in SKIPPED_ATTRIBUTES:
                yield f".{key}", item


def _plain(key: Any) -> bool:
    return isinstance(key, str | int | float | bool | tuple)


def snapshot(model: nn.Module, kernels: bool = True) -> dict[str, Any]:
    """Walk `model` and, where `kernels`, run each module's kernel. Changes nothing in the model."""
    walk = Walk()
    walk.model(model)
    shared = sorted(sorted(paths) for paths in walk.places.values() if len(paths) > 1)
    return {
        "tensors": walk.tensors,
        "numbers": walk.numbers,
        "shared": shared,
        "kernels": {name: digest(out)["sha256"] for name, out in run_kernels(model)}
        if kernels
        else {},
    }


def differences(ours: dict[str, Any], reference: dict[str, Any]) -> list[str]:
    """What differs, one line each: nothing where `ours` holds exactly what `reference` holds."""
    lines = []
    for part in ("tensors", "numbers", "kernels"):
        got, want = ours[part], reference[part]
        lines += [f"{part}: {path} is gone" for path in sorted(want.keys() - got.keys())]
        lines += [f"{part}: {path} is new" for path in sorted(got.keys() - want.keys())]
        lines += [
            f"{part}: {path} is {_short(got[path])}, not {_short(want[path])}"
            for path in sorted(got.keys() & want.keys())
            if got[path] != want[path]
        ]
    gone = [group for group in reference["shared"] if group not in ours["shared"]]
    new = [group for group in ours["shared"] if group not in reference["shared"]]
    lines += [f"shared: {group} share no bytes" for group in gone]
    lines += [f"shared: {group} share bytes" for group in new]
    return lines


def _short(value: Any) -> str:
    if isinstance(value, dict):
        return f"{value['dtype']}{value['shape']}:{value['sha256'][:8]}"
    return str(value)[:24]
