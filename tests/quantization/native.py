"""Bytes outside of Python's objects: memory from malloc, and PyCapsules that hold its address."""

import ctypes
from typing import Any

import torch

_libc = ctypes.CDLL(None)
_libc.malloc.restype = ctypes.c_void_p
_libc.malloc.argtypes = [ctypes.c_size_t]
_new = ctypes.pythonapi.PyCapsule_New
_new.restype = ctypes.py_object
_new.argtypes = [ctypes.c_void_p, ctypes.c_char_p, ctypes.c_void_p]
_pointer = ctypes.pythonapi.PyCapsule_GetPointer
_pointer.restype = ctypes.c_void_p
_pointer.argtypes = [ctypes.py_object, ctypes.c_char_p]


class Memory:
    """Never freed: a test's process is short, and native code may still look at it."""

    def __init__(self, tensor: torch.Tensor) -> None:
        self.address = self.leak(tensor)

    @staticmethod
    def leak(tensor: torch.Tensor) -> int:
        """Copy an int8 tensor to memory from malloc; returns its address."""
        address = int(_libc.malloc(tensor.numel()))
        ctypes.memmove(address, tensor.contiguous().numpy().ctypes.data, tensor.numel())
        return address


def capsule(tensor: torch.Tensor) -> Any:
    """A PyCapsule over a copy of an int8 tensor."""
    return _new(Memory.leak(tensor), None, None)


def capsule_address(handle: Any) -> int:
    return int(_pointer(handle, None))


def tensor_at(address: int, shape: Any) -> torch.Tensor:
    """The int8 tensor of `shape` that lies at `address`."""
    size = 1
    for length in shape:
        size *= length
    raw = (ctypes.c_int8 * size).from_address(address)
    return torch.frombuffer(raw, dtype=torch.int8).view(tuple(shape))
