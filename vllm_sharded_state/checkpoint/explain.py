"""msgspec's words about a manifest that does not fit, in ours."""

import re
from typing import Any

import msgspec

from .entries import PATTERNS

_AT_KEY = re.compile(r"- at `key` in `\$([\w.\[\]]*)`$")
_STEPS = re.compile(r"\.(\w+)|\[(\d+)\]")


def explain(error: Exception, data: bytes) -> str:
    """What `error`, raised by decoding `data`, says to somebody who never saw a pattern."""
    text = str(error) or type(error).__name__
    for pattern, description in PATTERNS.items():
        expected = f"`str` matching regex {pattern!r}"
        if expected in text:
            names = _wrong_keys(text, pattern, data)
            text = text.replace(expected, description)
            if names:
                text = f"{names[0]!r} is not {description} - {text.partition(' - ')[2]}"
    return text


def _wrong_keys(text: str, pattern: str, data: bytes) -> list[str]:
    """The keys that `text` speaks of without naming them."""
    where = _AT_KEY.search(text)
    if where is None or "[...]" in where[1]:
        return []
    value: Any = msgspec.json.decode(data)
    for name, number in _STEPS.findall(where[1]):
        value = value[name] if name else value[int(number)]
    return [key for key in value if not re.search(pattern, key)]
