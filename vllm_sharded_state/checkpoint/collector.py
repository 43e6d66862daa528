"""Python's garbage collector, kept away from work that makes very many objects and no cycles."""

import gc
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def paused() -> Iterator[None]:
    """Collect nothing meanwhile.

    Each time the number of objects has grown by a quarter the collector looks at all of them again,
    vLLM's own included: so the time that a tensor takes would grow with their number.
    """
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_enabled:
            gc.enable()
