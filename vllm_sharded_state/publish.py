"""What rank 0 publishes when every rank has written its own: the files beside the parts, the manifest."""

from pathlib import Path
from typing import Any

from torch import distributed as dist
from vllm.distributed import get_world_group
from vllm.logger import init_logger

from . import identity, sidefiles
from .checkpoint import manifest
from .checkpoint.manifest import Manifest, RankEntry
from .checkpoint.ranks import Alone, GroupRanks, Ranks

logger = init_logger("vllm.sharded_state.publish")


def ranks() -> Ranks:
    """The workers of this engine. Raises `SaveError` when one of them has ended."""
    if not dist.is_initialized() or get_world_group().world_size == 1:
        return Alone()
    return GroupRanks(get_world_group().cpu_group)


def stage_side_files(directory: Path, config: Any, save_id: str) -> None:
    """Stage the files of model and tokenizer that hold no weights. Raises `OSError`."""
    model_config = config.model_config
    model = _local_folder(str(model_config.model), model_config.revision)
    tokenizer = _local_folder(str(model_config.tokenizer), model_config.tokenizer_revision)
    sidefiles.stage(model, tokenizer, directory, save_id)


def describe(config: Any, entries: list[RankEntry], save_id: str) -> bytes:
    """The manifest of a save, as the bytes of its file."""
    return manifest.encode(
        Manifest(
            written_by=identity.written_by(),
            binding=identity.binding(config),
            tied_word_embeddings=_is_tied(config.model_config, entries),
            ranks=sorted(entries, key=lambda entry: entry.rank),
            save_id=save_id,
        )
    )


def _local_folder(origin: str, revision: str | None) -> Path | None:
    """The directory of a model or tokenizer: itself, or its snapshot in the hub's cache."""
    if Path(origin).is_dir():
        return Path(origin)
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import HfHubHTTPError, HFValidationError, LocalEntryNotFoundError

    try:
        return Path(snapshot_download(origin, revision=revision, local_files_only=True))
    except (LocalEntryNotFoundError, HFValidationError, HfHubHTTPError):
        logger.warning(
            "%s is not on this machine: its config and tokenizer were not copied", origin
        )
        return None


def _is_tied(model_config: Any, entries: list[RankEntry]) -> bool:
    if getattr(model_config.hf_config, "tie_word_embeddings", False):
        return True
    for entry in entries:
        for path, tensor in entry.tensors.items():
            names = [path, *tensor.aliases]
            if len(names) > 1 and any(name.endswith("lm_head.weight") for name in names):
                return True
    return False
