"""Python values that a module may derive from its weights, and how the manifest writes them.

Numbers, strings and sets of them are written as JSON; a float is written as its hexadecimal form, so
that it comes back bit for bit (NaN and infinity included).
"""

import decimal
import enum
import fractions
import math
from typing import Any

import numpy as np
import torch

#: Values that can be put back from the manifest.
RESTORABLE = (type(None), bool, int, float, str)
#: Values that are compared but never written: they hardly ever follow from weights.
CONFIGURED = (
    torch.dtype,
    torch.layout,
    torch.memory_format,
    torch.Size,
    enum.Enum,
    bytes,
    bytearray,
    complex,
    decimal.Decimal,
    fractions.Fraction,
    np.generic,
)

#: A Python integer at least this large that differs from the value a rehearsal gives is taken for an
#: address or handle, which must never be put back.
ADDRESS_LIKE = 2**31


def is_plain(value: object) -> bool:
    """Whether `value` is one leaf: a number, a string, or a set of them."""
    if isinstance(value, set | frozenset):
        return all(isinstance(item, RESTORABLE) for item in value)
    return isinstance(value, RESTORABLE + CONFIGURED)


def is_restorable(value: object) -> bool:
    """Whether `encode` can write `value`."""
    if isinstance(value, CONFIGURED):  # some are also numbers or strings: enums, NumPy floats
        return False
    return isinstance(value, (*RESTORABLE, set, frozenset))


def is_address_like(value: object) -> bool:
    """Whether `value` could be an address: restoring one from a file would corrupt memory."""
    return isinstance(value, int) and not isinstance(value, bool) and abs(value) >= ADDRESS_LIKE


def equal(a: object, b: object) -> bool:
    """Same type and same value; NaN equals NaN, and 0.0 differs from -0.0."""
    if type(a) is not type(b):
        return False
    if isinstance(a, float) and isinstance(b, float):
        if math.isnan(a) or math.isnan(b):
            return math.isnan(a) and math.isnan(b)
        return a == b and math.copysign(1, a) == math.copysign(1, b)
    return a == b


def encode(value: object) -> Any:
    """Write `value` as JSON. Raises `TypeError` for what `is_restorable` denies."""
    if isinstance(value, float):
        return {"float": value.hex()}
    if isinstance(value, set | frozenset):
        items = sorted((encode(item) for item in value), key=repr)
        return {type(value).__name__: items}
    if is_restorable(value):
        return value
    raise TypeError(f"a {type(value).__name__} cannot be written to the manifest")


def decode(data: Any) -> object:
    """Read what `encode` wrote.

    Raises `ValueError` for anything else, `OverflowError` for a float that is too large.
    """
    if isinstance(data, dict) and len(data) == 1:
        ((tag, body),) = data.items()
        if tag == "float" and isinstance(body, str):
            return float.fromhex(body)
        if tag in ("set", "frozenset") and isinstance(body, list):
            items = [decode(item) for item in body]
            if all(isinstance(item, RESTORABLE) for item in items):
                return set(items) if tag == "set" else frozenset(items)
    if isinstance(data, RESTORABLE):
        return data
    raise ValueError(f"not a value that the manifest holds: {data!r}")
