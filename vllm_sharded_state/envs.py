"""Every environment variable of this package, each a function that reads it when called.

| variable | values | meaning |
|---|---|---|
| `VSS_LAYOUT` | `auto` (default), `runtime`, `source` | layout to save, unless the engine says |
| `VSS_RELOAD_ATOMIC` | `model` (default), `layer` | what can be taken back after an error in a reload |
| `VSS_RELOAD_DIGEST` | `0` (default), `1` | whether a reload says what it got and what there is then |
| `VSS_RELOAD_KV_CACHE` | `clear` (default), `keep` | KV blocks of the old weights, unless the call says |
| `VSS_DISABLE_PATCHES` | patch names joined by commas, or `all` | changes to vLLM to leave out |
| `VSS_ALLOW_UNSUPPORTED_VLLM` | `0` (default), `1` | patch untested versions of vLLM too |

They are read at the moment of use rather than at import, because vLLM's worker processes import the
plugin before an embedding program has finished its own set-up. An empty value counts as unset.
"""

import os
from collections.abc import Collection

from vllm_sharded_state.errors import OptionError

RELOAD_ATOMIC = ("model", "layer")
RELOAD_KV_CACHE = ("clear", "keep")
LAYOUTS = ("auto", "runtime", "source")
ALL_PATCHES = "all"


def _choice(variable: str, allowed: Collection[str], default: str) -> str:
    value = os.environ.get(variable, "").strip() or default
    if value not in allowed:
        raise OptionError(
            f"{variable}={value!r} means nothing; set it to one of: {', '.join(allowed)}"
        )
    return value


def layout() -> str:
    """Return `VSS_LAYOUT`: `auto`, `runtime` or `source`.

    Raises:
        OptionError: the variable holds anything else.
    """
    return _choice("VSS_LAYOUT", LAYOUTS, "auto")


def reload_atomic() -> str:
    """Return `VSS_RELOAD_ATOMIC`: `model` or `layer`.

    Raises:
        OptionError: the variable holds anything else.
    """
    return _choice("VSS_RELOAD_ATOMIC", RELOAD_ATOMIC, "model")


def reload_digest() -> bool:
    """Return whether `VSS_RELOAD_DIGEST` is `1`.

    Raises:
        OptionError: the variable holds neither `0` nor `1`.
    """
    return _choice("VSS_RELOAD_DIGEST", ("0", "1"), "0") == "1"


def reload_kv_cache() -> str:
    """Return `VSS_RELOAD_KV_CACHE`: `clear` or `keep`.

    Raises:
        OptionError: the variable holds anything else.
    """
    return _choice("VSS_RELOAD_KV_CACHE", RELOAD_KV_CACHE, "clear")


def allow_unsupported_vllm() -> bool:
    """Return whether `VSS_ALLOW_UNSUPPORTED_VLLM` is `1`.

    Raises:
        OptionError: the variable holds neither `0` nor `1`.
    """
    return _choice("VSS_ALLOW_UNSUPPORTED_VLLM", ("0", "1"), "0") == "1"


def disabled_patches(known: Collection[str]) -> frozenset[str]:
    """Return the patches that `VSS_DISABLE_PATCHES` switches off; `all` stands for every one.

    Args:
        known: the names of all patches.

    Raises:
        OptionError: a name is not among `known`, which would silently leave that patch on.
    """
    variable = "VSS_DISABLE_PATCHES"
    value = os.environ.get(variable, "")
    names = {name.strip() for name in value.split(",")} - {""}
    if names == {ALL_PATCHES}:
        return frozenset(known)
    unknown = sorted(names - set(known))
    if unknown:
        raise OptionError(
            f"{variable}={value!r} names no patch with {', '.join(map(repr, unknown))}; "
            f"set it to '{ALL_PATCHES}', or to some of: {', '.join(sorted(known))}"
        )
    return frozenset(names)
