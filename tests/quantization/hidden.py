"""Methods that keep what they made of the weights where no walk over the module finds it."""

import array
import ctypes
import hashlib
from typing import Any

import torch
from torch import nn

from tests.quantization.base import Packing, Plain, forget, method, packed, unpacked, whole
from tests.quantization.native import Memory, capsule, capsule_address, tensor_at

#: Registries of this process, as compiled extensions keep them.
BY_HANDLE: list[tuple[torch.Tensor, float]] = []
BY_NAME: dict[str, tuple[torch.Tensor, float]] = {}
BY_ID: dict[int, tuple[torch.Tensor, float]] = {}
BY_CONTENT: dict[str, tuple[torch.Tensor, float]] = {}


class _InRegistry(Packing):
    """Keeps `(ints, alpha)` in `BY_HANDLE`; `name` and `index` turn an index into a handle and back."""

    def put(self, layer: Any, ints: torch.Tensor, alpha: float) -> None:
        BY_HANDLE.append((ints, alpha))
        layer.handle = self.name(len(BY_HANDLE) - 1)

    def got(self, layer: Any) -> tuple[torch.Tensor, float]:
        return BY_HANDLE[self.index(layer.handle)]

    def name(self, index: int) -> Any:
        return index

    def index(self, handle: Any) -> int:
        return handle


method("handle")(_InRegistry)


@method("handle_in_string")
class HandleInString(_InRegistry):
    def name(self, index: int) -> Any:
        return f"weight-{index}"

    def index(self, handle: Any) -> int:
        return int(handle.partition("-")[2])


@method("handle_in_set")
class HandleInSet(_InRegistry):
    def name(self, index: int) -> Any:
        return frozenset({index})

    def index(self, handle: Any) -> int:
        (index,) = handle
        return index


@method("handle_in_float")
class HandleInFloat(_InRegistry):
    def name(self, index: int) -> Any:
        return float(index)

    index = staticmethod(int)


@method("handle_in_attribute_tensor")
class HandleInTensor(_InRegistry):
    def name(self, index: int) -> Any:
        return torch.tensor([index])

    index = staticmethod(int)


@method("handle_in_parameter")
class HandleInParameter(_InRegistry):
    """As custom ops keep a handle: the small integer tensor is a parameter."""

    def name(self, index: int) -> Any:
        return nn.Parameter(torch.tensor([index]), requires_grad=False)

    index = staticmethod(int)


@method("handle_in_float_buffer")
class HandleInFloatBuffer(_InRegistry):
    def put(self, layer: Any, ints: torch.Tensor, alpha: float) -> None:
        BY_HANDLE.append((ints, alpha))
        layer.register_buffer("handle", torch.tensor([float(len(BY_HANDLE) - 1)]))

    index = staticmethod(int)


@method("handle_in_tuple")
class HandleInTuple(_InRegistry):
    def name(self, index: int) -> Any:
        return (index, "int8")

    def index(self, handle: Any) -> int:
        return handle[0]


@method("reused_handle")
class ReusedHandle(_InRegistry):
    """A registry that hands out the lowest free index, and frees those of layers that are gone.

    One registry a model, so the handles of a process that loads and of one that saves are the same.
    """

    def put(self, layer: Any, ints: torch.Tensor, alpha: float) -> None:
        kept = self.config.kept.setdefault("registry", {})
        layer.handle = len(kept)
        kept[layer.handle] = (ints, alpha)

    def got(self, layer: Any) -> tuple[torch.Tensor, float]:
        return self.config.kept["registry"][layer.handle]


@method("by_name")
class ByName(Packing):
    """Keyed by the layer's name: a second model in the process takes the first one's place."""

    def put(self, layer: Any, ints: torch.Tensor, alpha: float) -> None:
        BY_NAME[self.prefix] = ints, alpha

    def got(self, layer: Any) -> tuple[torch.Tensor, float]:
        return BY_NAME[self.prefix]


@method("copy_by_name")
class CopyByName(Plain):
    """The same for a copy: the module keeps its weight, the kernel reads the registry."""

    def process(self, layer: Any) -> None:
        BY_NAME[self.prefix] = packed(layer)

    def matrix(self, layer: Any) -> torch.Tensor:
        return unpacked(*BY_NAME[self.prefix])


@method("by_id")
class ById(Packing):
    def put(self, layer: Any, ints: torch.Tensor, alpha: float) -> None:
        BY_ID[id(layer)] = ints, alpha

    def got(self, layer: Any) -> tuple[torch.Tensor, float]:
        return BY_ID[id(layer)]


@method("copy_by_id")
class CopyById(Plain):
    """The weight is transposed in sight, and copied out of sight."""

    def process(self, layer: Any) -> None:
        BY_ID[id(layer)] = packed(layer)
        layer.weight = nn.Parameter(layer.weight.data.t().contiguous(), requires_grad=False)

    def matrix(self, layer: Any) -> torch.Tensor:
        return unpacked(*BY_ID[id(layer)])


@method("wide_copy_by_id")
class WideCopyById(Plain):
    """The copy out of sight is read for many rows only, as kernels for large batches do."""

    def process(self, layer: Any) -> None:
        BY_ID[id(layer)] = packed(layer)

    def apply(self, layer: Any, x: torch.Tensor, bias: Any = None) -> torch.Tensor:
        if x.shape[0] <= 16:
            return super().apply(layer, x, bias)
        y = x.float() @ unpacked(*BY_ID[id(layer)])
        return (y if bias is None else y + bias.float()).to(x.dtype)


@method("by_content")
class ByContent(Packing):
    """Keyed by a digest of the weight: equal in each process, but empty in a new one."""

    def put(self, layer: Any, ints: torch.Tensor, alpha: float) -> None:
        layer.digest = hashlib.sha256(ints.numpy().tobytes()).hexdigest()
        BY_CONTENT[layer.digest] = ints, alpha

    def got(self, layer: Any) -> tuple[torch.Tensor, float]:
        return BY_CONTENT[layer.digest]


@method("on_class")
class OnClass(Packing):
    """Keyed by name in a dict of the class."""

    kept: dict[str, Any] = {}  # noqa: RUF012

    def put(self, layer: Any, ints: torch.Tensor, alpha: float) -> None:
        self.kept[self.prefix] = ints, alpha

    def got(self, layer: Any) -> tuple[torch.Tensor, float]:
        return self.kept[self.prefix]


@method("on_config")
class OnConfig(Packing):
    """Keyed by name in a dict of the quantization config, which all layers reach."""

    def put(self, layer: Any, ints: torch.Tensor, alpha: float) -> None:
        self.config.kept[self.prefix] = ints, alpha

    def got(self, layer: Any) -> tuple[torch.Tensor, float]:
        return self.config.kept[self.prefix]


@method("capsule_on_config")
class CapsuleOnConfig(Packing):
    """A native handle on the quantization config, which can't be copied."""

    def put(self, layer: Any, ints: torch.Tensor, alpha: float) -> None:
        layer.alpha = alpha
        self.config.kept[self.prefix] = Memory(ints), capsule(ints), ints.shape

    def got(self, layer: Any) -> tuple[torch.Tensor, float]:
        _, handle, shape = self.config.kept[self.prefix]
        return tensor_at(capsule_address(handle), shape), layer.alpha


@method("capsule")
class InCapsule(Packing):
    """The bytes lie outside of Python; the module holds an opaque handle."""

    def put(self, layer: Any, ints: torch.Tensor, alpha: float) -> None:
        layer.form, layer.alpha, layer.handle = ints.shape, alpha, capsule(ints)

    def got(self, layer: Any) -> tuple[torch.Tensor, float]:
        return tensor_at(capsule_address(layer.handle), layer.form), layer.alpha


@method("address")
class AtAddress(Packing):
    """The module holds the bare address, an integer."""

    def put(self, layer: Any, ints: torch.Tensor, alpha: float) -> None:
        layer.form, layer.alpha, layer.pointer = ints.shape, alpha, Memory.leak(ints)

    def got(self, layer: Any) -> tuple[torch.Tensor, float]:
        return tensor_at(layer.pointer, layer.form), layer.alpha


@method("ctypes")
class InCtypes(Packing):
    def put(self, layer: Any, ints: torch.Tensor, alpha: float) -> None:
        layer.form, layer.alpha = ints.shape, ctypes.c_double(alpha)
        layer.kept = (ctypes.c_int8 * ints.numel()).from_buffer_copy(ints.numpy().tobytes())

    def got(self, layer: Any) -> tuple[torch.Tensor, float]:
        ints = torch.frombuffer(layer.kept, dtype=torch.int8).view(layer.form)
        return ints, layer.alpha.value


@method("array")
class InArray(Packing):
    """`array.array` and `bytearray`."""

    def put(self, layer: Any, ints: torch.Tensor, alpha: float) -> None:
        layer.form, layer.alpha = ints.shape, array.array("d", [alpha])
        layer.kept = bytearray(ints.numpy().tobytes())

    def got(self, layer: Any) -> tuple[torch.Tensor, float]:
        ints = torch.frombuffer(layer.kept, dtype=torch.int8).view(layer.form)
        return ints, layer.alpha[0]


@method("script_object")
class InScriptObject(Plain):
    """Weights that torch's own quantized operators have packed."""

    def process(self, layer: Any) -> None:
        full = whole(layer)
        forget(layer)
        alpha = float(full.abs().max()) / 64
        quantized = torch.quantize_per_tensor(full, alpha, 0, torch.qint8)
        layer.handle = torch.ops.quantized.linear_prepack(quantized, None)

    def apply(self, layer: Any, x: torch.Tensor, bias: Any = None) -> torch.Tensor:
        y = torch.ops.quantized.linear_dynamic(x.float(), layer.handle, True)
        return (y if bias is None else y + bias.float()).to(x.dtype)
