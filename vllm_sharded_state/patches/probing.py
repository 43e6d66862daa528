"""Small tools for probes: they run upstream code in every process, unseen and without a trace."""

import logging
from collections.abc import Iterator
from contextlib import contextmanager
from types import ModuleType
from typing import Any


@contextmanager
def replaced(module: ModuleType, **values: Any) -> Iterator[None]:
    """Give attributes of `module` other values inside the block."""
    before = {name: getattr(module, name) for name in values}
    try:
        for name, value in values.items():
            setattr(module, name, value)
        yield
    finally:
        for name, value in before.items():
            setattr(module, name, value)


@contextmanager
def quiet(logger: logging.Logger) -> Iterator[None]:
    """Keep `logger` silent inside the block: a toy's messages would pass for the user's model."""
    before = logger.disabled
    logger.disabled = True
    try:
        yield
    finally:
        logger.disabled = before
