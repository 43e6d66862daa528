"""Publish a checkpoint once every rank has written its own: the files beside it, then the manifest."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

from torch import distributed as dist
from vllm.distributed import get_world_group
from vllm.logger import init_logger

from . import identity, remote, sidefiles
from .checkpoint import manifest
from .checkpoint.manifest import Manifest, RankEntry
from .errors import SaveError, listed

logger = init_logger("vllm.sharded_state.publish")


def _copy_side_files(directory: Path, config: Any) -> None:
    model = config.model_config
    token = getattr(model, "hf_token", None)
    origins = [(str(model.model), model.revision)]
    if str(model.tokenizer) != str(model.model):
        origins.append((str(model.tokenizer), model.tokenizer_revision))
    for origin, revision in origins:
        folder = remote.local_folder(origin, revision, token)
        if folder is not None:
            sidefiles.copy(folder, directory)


def _is_tied(model_config: Any, entries: list[RankEntry]) -> bool:
    if getattr(model_config.hf_config, "tie_word_embeddings", False):
        return True
    for entry in entries:
        for path, tensor in entry.tensors.items():
            names = [path, *tensor.aliases]
            if len(names) > 1 and any(name.endswith("lm_head.weight") for name in names):
                return True
    return False


def exchange(entry: RankEntry | None, failure: BaseException | None) -> list[RankEntry]:
    """Give every rank's entry to all; raise everywhere when one rank failed."""
    if not dist.is_initialized() or get_world_group().world_size == 1:
        if failure is not None:
            raise failure
        assert entry is not None
        return [entry]
    group = get_world_group()
    told = None if failure is None else f"{type(failure).__name__}: {failure}"
    results: list[Any] = [None] * group.world_size
    dist.all_gather_object(results, (entry, told), group=group.cpu_group)
    if failure is not None:
        raise failure
    failed = [f"rank {rank}: {text}" for rank, (_, text) in enumerate(results) if text]
    if failed:
        raise SaveError(f"Nothing was published, because saving failed on:\n{listed(failed)}")
    return [result for result, _ in results]


def barrier() -> None:
    """Wait for every rank."""
    if dist.is_initialized() and get_world_group().world_size > 1:
        dist.barrier(group=get_world_group().cpu_group)


def replace(
    directory: Path, config: Any, entries: list[RankEntry], commit: Callable[[], None]
) -> None:
    """Put the new parts of all ranks in the place of whatever `directory` held, then the manifest.

    `commit` gives this rank's parts their names. In between the directory says that it is unfinished.
    Raises `SaveError`.
    """
    first = not dist.is_initialized() or dist.get_rank() == 0
    try:
        if first:
            manifest.mark_unfinished(directory)
        barrier()
        commit()
        barrier()
        if first:
            _copy_side_files(directory, config)
            manifest.write(
                directory,
                Manifest(
                    written_by=identity.written_by(),
                    binding=identity.binding(config),
                    tied_word_embeddings=_is_tied(config.model_config, entries),
                    ranks=sorted(entries, key=lambda entry: entry.rank),
                ),
            )
        barrier()
    except OSError as error:
        raise SaveError(f"{directory} can't be written: {error}") from error
