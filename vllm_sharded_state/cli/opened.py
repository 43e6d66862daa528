"""A saved directory, opened for the commands: its manifest, and a reader for each rank."""

from pathlib import Path

from vllm_sharded_state.checkpoint import manifest, staging
from vllm_sharded_state.checkpoint.manifest import Manifest, RankEntry
from vllm_sharded_state.checkpoint.reading import PartReader
from vllm_sharded_state.errors import ManifestError


def read_manifest(directory: Path) -> Manifest:
    """The manifest of `directory`.

    Raises `ManifestError` where there is none or it is damaged, and `IncompleteError` after a save that
    was killed in its last step.
    """
    if not directory.is_dir():
        what = "is a file" if directory.exists() else "does not exist"
        raise ManifestError(f"{directory} {what}. Name a directory that save_sharded_state wrote.")
    found = manifest.read(directory)
    if found is None:
        raise ManifestError(
            f"{directory} has no {manifest.FILE_NAME}: no save by vllm-sharded-state ended there.\n"
            "Name the directory that was given to save_sharded_state."
        )
    staging.refuse_waiting(directory, found.save_id)
    return found


def open_rank(directory: Path, found: Manifest, rank: RankEntry) -> PartReader:
    """A reader of one rank's files, sizes and headers compared. Raises `IncompleteError`."""
    return PartReader(directory, rank.files, found.save_id)
