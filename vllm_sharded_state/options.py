"""The options that users set: keys of `model_loader_extra_config`, and the layout to save in."""

import copy
from dataclasses import dataclass
from typing import Any

from . import envs
from .checkpoint.reading import VERIFY
from .errors import OptionError

#: Keys of this package, beside upstream's `pattern`.
OWN_KEYS = ("layout", "source", "strict", "verify")


@dataclass(frozen=True)
class Options:
    """`strict`: whether a missing tensor is an error. `layout`: the layout to save in, if given.

    `source`: the checkpoint (path or hub id) from which the sharded state has to have been saved.
    `verify`: what a load compares, one of `checkpoint.reading.VERIFY`.
    """

    strict: bool = True
    layout: str | None = None
    source: str | None = None
    verify: str = "full"


def take(load_config: Any) -> tuple[Any, Options]:
    """Split a `LoadConfig` into upstream's part and this package's options.

    Raises `OptionError` for an unknown key, or a value that means nothing.
    """
    extra = dict(load_config.model_loader_extra_config or {})
    unknown = sorted(set(extra) - {"pattern", *OWN_KEYS})
    if unknown:
        known = ", ".join(sorted(("pattern", *OWN_KEYS)))
        raise OptionError(
            f"Unexpected extra config keys for load format {load_config.load_format}: {unknown}.\n"
            f"Known keys: {known}."
        )
    strict = extra.pop("strict", True)
    if not isinstance(strict, bool):
        raise OptionError(
            f"model_loader_extra_config: strict must be true or false, not {strict!r}"
        )
    layout = _layout(extra.pop("layout", None))
    source = extra.pop("source", None)
    if source is not None and (not isinstance(source, str) or not source):
        raise OptionError(
            f"model_loader_extra_config: source must be a path or hub id, not {source!r}"
        )
    verify = extra.pop("verify", "full")
    if verify not in VERIFY:
        raise OptionError(
            f"model_loader_extra_config: verify is {verify!r}; set it to one of: {', '.join(VERIFY)}"
        )
    stripped = copy.copy(load_config)
    stripped.model_loader_extra_config = extra
    return stripped, Options(strict, layout, source, verify)


def layout_to_save(load_config: Any) -> str:
    """The layout asked for: the saving engine's key `layout`, or else `VSS_LAYOUT`, or else `auto`."""
    extra = load_config.model_loader_extra_config
    asked = extra.get("layout") if isinstance(extra, dict) else None
    return _layout(asked) or envs.layout()


def _layout(value: Any) -> str | None:
    if value is not None and value not in envs.LAYOUTS:
        raise OptionError(
            f"model_loader_extra_config: layout is {value!r}; "
            f"set it to one of: {', '.join(envs.LAYOUTS)}"
        )
    return value
