"""One case: what is done to a copy of a good directory, and what the load has to say to it."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

Change = Callable[[Path], None]


@dataclass(frozen=True)
class Case:
    """`change` spoils a copy of the good directory `base`; loading it with `engine` must raise.

    The error says each of `words`. Where `loads` gives a reason, it loads, and is exactly what was saved
    in the good directory `like`.
    """

    name: str
    base: str
    change: Change
    words: tuple[str, ...]
    engine: Mapping[str, Any] = field(default_factory=dict)
    loads: str | None = None
    like: str | None = None
