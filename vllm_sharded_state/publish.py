"""What rank 0 publishes when every rank has written its own: the files beside the parts, the manifest."""

from pathlib import Path
from typing import Any

from torch import distributed as dist
from vllm.distributed import get_world_group

from . import identity, remote, sidefiles
from .checkpoint import manifest, store
from .checkpoint.manifest import Manifest, RankEntry, SideFile, Source
from .checkpoint.ranks import Alone, GroupRanks, Ranks
from .source_identity import Recorder


def ranks() -> Ranks:
    """The workers of this engine. Raises `SaveError` when one of them has ended."""
    if not dist.is_initialized() or get_world_group().world_size == 1:
        return Alone()
    return GroupRanks(get_world_group().cpu_group)


def stage_side_files(directory: Path, config: Any, save_id: str) -> dict[str, SideFile]:
    """Stage the files of model and tokenizer that hold no weights. Raises `OSError`."""
    model_config = config.model_config
    token = getattr(model_config, "hf_token", None)
    model = remote.local_folder(str(model_config.model), model_config.revision, token)
    tokenizer = remote.local_folder(
        str(model_config.tokenizer), model_config.tokenizer_revision, token
    )
    staged = sidefiles.stage(model, tokenizer, directory, save_id)
    return {name: SideFile(size, checksum) for name, (size, checksum) in staged.items()}


def describe(
    config: Any,
    entries: list[RankEntry],
    save_id: str,
    source: Source | None,
    side_files: dict[str, SideFile],
) -> bytes:
    """The manifest of a save, as the bytes of its file. Raises `ManifestError` where it is not sound."""
    return manifest.encode(
        Manifest(
            written_by=identity.written_by(),
            binding=identity.binding(config),
            tied_word_embeddings=_is_tied(config.model_config, entries),
            ranks=sorted(entries, key=lambda entry: entry.rank),
            save_id=save_id,
            source=source,
            side_files=side_files,
        )
    )


def record_source(config: Any) -> Recorder:
    """Begin to read what the engine was started from."""
    model = config.model_config
    name = str(model.model_weights or model.model)
    folder = None if store.is_remote(name) else remote.local_folder(name, model.revision)
    return Recorder(config, folder)


def _is_tied(model_config: Any, entries: list[RankEntry]) -> bool:
    if getattr(model_config.hf_config, "tie_word_embeddings", False):
        return True
    for entry in entries:
        for path, tensor in entry.tensors.items():
            names = [path, *tensor.aliases]
            if len(names) > 1 and any(name.endswith("lm_head.weight") for name in names):
                return True
    return False
