"""What a path holds: sharded state, or a checkpoint in the model's own format.

A running engine may have been given the weights of another path than it was started from, so its load
format says nothing about what its configuration names now.
"""

import copy
import fnmatch
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from vllm.model_executor.model_loader.sharded_state_loader import ShardedStateLoader

from . import remote
from .checkpoint import collector, store
from .checkpoint.manifest import Manifest
from .remote import FORMATS, STREAMED_FORMAT, Location


@dataclass(frozen=True)
class Held:
    """A sharded state: where it lies, and its manifest."""

    location: Location
    manifest: Manifest


def sharded_state(load_config: Any, model_config: Any) -> Held | None:
    """The sharded state that `model_config` names; None where there is none that has a manifest.

    Raises `ManifestError`, `FetchError`. A hub that can't be reached is no error: it counts as holding
    none.
    """
    name = str(model_config.model_weights or model_config.model)
    if store.is_remote(name):
        load_config = copy.copy(load_config)
        load_config.load_format = STREAMED_FORMAT
    elif not Path(name).is_dir():
        token = getattr(model_config, "hf_token", None)
        if remote.cached_manifest(name, model_config.revision, token) is None:
            return None
    location = remote.locate(load_config, model_config)
    with collector.paused():
        found = location.manifest()
    return None if found is None else Held(location, found)


def has_parts_alone(load_config: Any, folder: Path) -> bool:
    """Whether `folder`, without a manifest, has parts of this rank, as stock vLLM saves them."""
    extra = load_config.model_loader_extra_config
    given = extra.get("pattern") if isinstance(extra, dict) else None
    name = ShardedStateLoader._render_default_pattern(given, part="*")
    return folder.is_dir() and bool(fnmatch.filter((x.name for x in folder.iterdir()), name))


def own_format(load_config: Any) -> Any:
    """A copy of `load_config` that reads the model's own format, if it reads sharded state."""
    return as_auto(load_config) if load_config.load_format in FORMATS else load_config


def as_auto(load_config: Any) -> Any:
    """A copy of `load_config` that reads the model's own format, in whichever files it finds."""
    load_config = copy.copy(load_config)
    load_config.load_format, load_config.model_loader_extra_config = "auto", {}
    return load_config
