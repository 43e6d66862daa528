"""Dtypes as the safetensors format names them."""

import torch

#: Names of dtypes in the safetensors format, where torch's differ.
_DTYPES = {
    torch.float64: "F64",
    torch.float32: "F32",
    torch.float16: "F16",
    torch.bfloat16: "BF16",
    torch.float8_e4m3fn: "F8_E4M3",
    torch.float8_e5m2: "F8_E5M2",
    torch.float8_e4m3fnuz: "F8_E4M3FNUZ",
    torch.float8_e5m2fnuz: "F8_E5M2FNUZ",
    torch.float8_e8m0fnu: "F8_E8M0",
    torch.int64: "I64",
    torch.int32: "I32",
    torch.int16: "I16",
    torch.int8: "I8",
    torch.uint64: "U64",
    torch.uint32: "U32",
    torch.uint16: "U16",
    torch.uint8: "U8",
    torch.bool: "BOOL",
    torch.complex64: "C64",
}

#: Every name that a manifest may use, and the bytes that one element takes.
NAMES = {name: dtype.itemsize for dtype, name in _DTYPES.items()}

_BY_NAME = {name: dtype for dtype, name in _DTYPES.items()}


def dtype_name(dtype: torch.dtype) -> str:
    """The safetensors name of a dtype. Raises `KeyError` for one that the format lacks."""
    return _DTYPES[dtype]


def holds(dtype: torch.dtype) -> bool:
    """Whether the safetensors format has `dtype`."""
    return dtype in _DTYPES


def torch_dtype(name: str) -> torch.dtype:
    """The dtype that the safetensors format calls `name`. Raises `KeyError` for an unknown one."""
    return _BY_NAME[name]
