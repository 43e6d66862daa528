"""Whether a checkpoint belongs to this engine: asked before anything of it is read into a model."""

from typing import Any

from vllm.model_executor.model_loader.sharded_state_loader import ShardedStateLoader

from . import identity, remote, source_identity
from .checkpoint import collector, manifest, staging
from .checkpoint.manifest import Manifest, RankEntry
from .checkpoint.writing import strange_names
from .errors import IncompleteError, ManifestError, listed
from .options import Options
from .remote import Location
from .saved_rank import SavedRank


def open_rank(
    found: Manifest, location: Location, vllm_config: Any, pattern: str | None, options: Options
) -> SavedRank:
    """This rank's entry and parts, when the checkpoint belongs to this engine.

    `pattern` names part files as upstream's loader does. Raises `ShardedStateError`.
    """
    if location.folder is not None:
        staging.refuse_waiting(location.folder, found.save_id)
    entry = _entry(found, location, vllm_config, pattern)
    reader = location.open(entry.files, found.save_id, options.verify)
    try:
        with collector.paused():
            return SavedRank(location, entry, reader, options.strict)
    except BaseException:
        reader.close()
        raise


def refuse_other_source(found: Manifest | None, location: Location, options: Options) -> None:
    """Raise `MismatchError` unless it was saved from the checkpoint that the key `source` asks for."""
    if options.source is not None:
        source_identity.refuse_other(
            None if found is None else found.source,
            options.source,
            remote.local_folder(options.source, None),
            location,
        )


def _entry(found: Manifest, location: Location, vllm_config: Any, pattern: str | None) -> RankEntry:
    in_runtime = any(
        unit.layout == "runtime" and unit.method
        for rank in found.ranks
        for unit in rank.units.values()
    )
    here = identity.binding(vllm_config)
    identity.refuse_mismatch(found.binding, here, in_runtime, location)
    entry = found.rank(identity.rank())
    _refuse_false_untying(found, entry, location)
    _refuse_strangers(location, entry, pattern, found.save_id)
    return entry


def _refuse_false_untying(found: Manifest, entry: RankEntry, location: Location) -> None:
    """Raise `ManifestError` where word embeddings are one tensor and are said to be two."""
    shared = [
        f"{path}, {', '.join(tensor.aliases)}"
        for path, tensor in entry.tensors.items()
        if tensor.aliases
        and any(name.endswith("lm_head.weight") for name in (path, *tensor.aliases))
    ]
    if shared and not found.tied_word_embeddings:
        raise ManifestError(
            f"{manifest.FILE_NAME} in {location} says that word embeddings are not tied, and that these "
            f"are one tensor:\n{listed(shared)}\nSave the model again."
        )


def _refuse_strangers(
    location: Location, entry: RankEntry, pattern: str | None, save_id: str
) -> None:
    """Raise `IncompleteError` for part files that look like this rank's but that no save wrote here."""

    def name(part: str) -> str:
        return ShardedStateLoader._render_default_pattern(pattern, part=part)

    known = set(entry.files)
    if location.folder is not None:
        known |= staging.waiting_removal(location.folder, save_id)
    strangers = strange_names(location.names(), name, known)
    if strangers:
        raise IncompleteError(
            f"{location} holds parts that {manifest.FILE_NAME} does not list, as if two saves were "
            f"mixed:\n{listed(strangers)}\n"
            "Remove them, or save again into an empty directory."
        )
