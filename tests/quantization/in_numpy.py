"""Methods that keep what they made of the weights in arrays and scalars of numpy, and in bytes."""

from typing import Any

import numpy as np
import torch

from tests.quantization.base import Packing, method


@method("numpy")
class InNumpy(Packing):
    def put(self, layer: Any, ints: torch.Tensor, alpha: float) -> None:
        layer.ints, layer.alpha = ints.numpy().copy(), np.array([alpha])

    def got(self, layer: Any) -> tuple[torch.Tensor, float]:
        return torch.from_numpy(layer.ints), float(layer.alpha[0])


@method("numpy_reversed")
class InNumpyReversed(InNumpy):
    """Torch has no negative strides."""

    def put(self, layer: Any, ints: torch.Tensor, alpha: float) -> None:
        layer.ints, layer.alpha = ints.numpy().copy()[::-1], np.array([alpha])

    def got(self, layer: Any) -> tuple[torch.Tensor, float]:
        return torch.from_numpy(layer.ints.copy()), float(layer.alpha[0])


@method("numpy_structured")
class InNumpyStructured(Packing):
    """Nor has it structured dtypes."""

    def put(self, layer: Any, ints: torch.Tensor, alpha: float) -> None:
        layer.alpha = alpha
        layer.kept = np.zeros(ints.shape, dtype=[("value", "i1"), ("rest", "i1")])
        layer.kept["value"] = ints.numpy()

    def got(self, layer: Any) -> tuple[torch.Tensor, float]:
        return torch.from_numpy(layer.kept["value"].copy()), layer.alpha


@method("numpy_read_only")
class InNumpyReadOnly(InNumpy):
    """The array reads immutable bytes."""

    def put(self, layer: Any, ints: torch.Tensor, alpha: float) -> None:
        raw = ints.numpy().tobytes()
        layer.ints = np.frombuffer(raw, dtype=np.int8).reshape(ints.shape)
        layer.alpha = np.array([alpha])

    got = InNumpyReversed.got


@method("numpy_scalar")
class InNumpyScalar(Packing):
    """A float32 scalar of numpy's, there before processing already."""

    def create_weights(self, layer: Any, *args: Any, **kwargs: Any) -> None:
        super().create_weights(layer, *args, **kwargs)
        layer.alpha = np.float32(1.0)

    def put(self, layer: Any, ints: torch.Tensor, alpha: float) -> None:
        layer.ints, layer.alpha = ints, np.float32(alpha)

    def got(self, layer: Any) -> tuple[torch.Tensor, float]:
        return layer.ints, float(layer.alpha)


@method("bytes")
class InBytes(Packing):
    def put(self, layer: Any, ints: torch.Tensor, alpha: float) -> None:
        layer.raw, layer.alpha = ints.numpy().tobytes(), alpha

    def got(self, layer: Any) -> tuple[torch.Tensor, float]:
        full = torch.frombuffer(bytearray(layer.raw), dtype=torch.int8)
        return full.view(layer.columns, -1), layer.alpha

    def create_weights(self, layer: Any, *args: Any, **kwargs: Any) -> None:
        super().create_weights(layer, *args, **kwargs)
        layer.columns = layer.weight.shape[1]
