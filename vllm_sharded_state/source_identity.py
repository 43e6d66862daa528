"""Which checkpoint an engine was started from: recorded when saving, asked for when loading.

Two fine-tunes of one model agree in every configuration, name, shape and header, so only the content of
their weight files tells them apart. What is recorded is what the engine was *started* from: whether the
weights were changed in memory since (by RL, say) it can't tell.
"""

import fnmatch
import json
import threading
from pathlib import Path
from typing import Any

from torch import distributed as dist
from vllm.distributed import get_world_group
from vllm.logger import init_logger

from . import held
from .checkpoint import fingerprint, manifest
from .checkpoint.entries import Source, SourceFile
from .errors import ManifestError, MismatchError, OptionError, listed
from .remote import FORMATS

logger = init_logger("vllm.sharded_state.source_identity")

#: Weight files, the kinds that upstream prefers first (`DefaultModelLoader._prepare_weights`).
_KINDS = ("*.safetensors", "*.bin", "*.pt", "*.gguf")
#: Not weights, or copies of them (upstream's `filter_files_not_needed_for_inference`).
_NOT_WEIGHTS = ("training_args.bin", "optimizer.bin", "optimizer.pt", "scheduler.pt", "scaler.pt")
_INDEX = "model.safetensors.index.json"


class Recorder:
    """Reads the engine's source checkpoint in the background while its weights are saved.

    Reading costs one pass over the files (`docs/format.md` has figures). `result` is None where there
    are none: dummy weights, object storage, a hub id that is not in the local cache.
    """

    def __init__(self, vllm_config: Any, folder: Path | None) -> None:
        """`folder` holds the engine's own model; None where it is on no disk."""
        self._config = vllm_config
        self._folder = folder
        self._source: Source | None = None
        self._failure: Exception | None = None
        self._thread = threading.Thread(target=self._read, name="vss-source", daemon=True)
        self._thread.start()

    def result(self) -> Source | None:
        """Wait for it. A file that can't be read leaves a warning and None."""
        self._thread.join()
        if self._failure is not None:
            logger.warning(
                "What this model was loaded from can't be read again (%s), so the checkpoint does not "
                "record it, and can't be loaded with the option 'source'.",
                self._failure,
            )
        return self._source

    def _read(self) -> None:
        try:
            self._source = _source(self._config, self._folder)
        except (OSError, ManifestError) as error:
            self._failure = error


def _source(config: Any, folder: Path | None) -> Source | None:
    model = config.model_config
    single = Path(str(model.model))  # as GGUF has it
    if single.is_file():
        files = fingerprint.source_files(single.parent, [single.name])
        return Source(str(model.model), model.revision, files)
    if folder is None or config.load_config.load_format == "dummy":
        return None
    before = manifest.read(folder)
    if before is not None:
        # What its directory was saved from; `through` tells that it came by way of it.
        if before.source is None:
            return None
        old = before.source
        return Source(old.name, old.revision, old.files, [*old.through, before.save_id])
    load_config = config.load_config
    if load_config.load_format in FORMATS and held.has_parts_alone(load_config, folder):
        return None
    files = fingerprint.source_files(folder, weight_files(folder))
    return Source(str(model.model), model.revision, files) if files else None


def weight_files(folder: Path) -> list[str]:
    """The names of the weight files of a model in `folder`: of one kind, and those of its index."""
    names = sorted(path.name for path in folder.iterdir() if path.is_file())
    for kind in _KINDS:
        found = [name for name in names if fnmatch.fnmatch(name, kind) and name not in _NOT_WEIGHTS]
        if found:
            return _indexed(folder, found)
    return []


def _indexed(folder: Path, names: list[str]) -> list[str]:
    """Without the files that an index, where there is one, does not name (consolidated copies)."""
    try:
        index = json.loads((folder / _INDEX).read_bytes())["weight_map"]
    except FileNotFoundError:
        return names
    except (ValueError, KeyError, TypeError) as error:
        raise OSError(f"{folder / _INDEX} is no index of weights: {error}") from error
    listed_names = set(index.values())
    return [name for name in names if name in listed_names] or names


def refuse_other(saved: Source | None, asked: str, folder: Path | None, directory: object) -> None:
    """Raise `MismatchError` unless `directory` was saved from exactly the checkpoint `asked` for.

    `folder` is where that lies. Names, sizes and headers are compared first, by every rank; the content
    by rank 0, which tells the others.
    """
    if folder is None:
        raise OptionError(
            f"model_loader_extra_config: source is {asked!r}, which is no directory and no hub id in "
            "the local cache.\nGive the path of the checkpoint that this one was saved from."
        )
    if saved is None:
        raise MismatchError(
            f"{directory} does not record what it was saved from, so that it can't be compared with "
            f"source={asked!r}.\nSave again from that checkpoint, or leave the option out."
        )
    try:
        different = _outlines(saved.files, folder) or _told(lambda: _contents(saved.files, folder))
    except OSError as error:
        raise MismatchError(
            f"source={asked!r} can't be compared with what {directory} was saved from: {error}"
        ) from error
    if different:
        raise MismatchError(
            f"{directory} was saved from {saved.name}, and {asked} is not the same:\n"
            f"{listed(different)}\nGive the one that it was saved from, or save again from this one."
        )


def _outlines(saved: dict[str, SourceFile], folder: Path) -> list[str]:
    here = {name: fingerprint.outline(folder / name) for name in weight_files(folder)}
    lines = []
    for name in saved.keys() | here.keys():
        if name not in here:
            lines.append(f"{name}: not there")
        elif name not in saved:
            lines.append(f"{name}: was not there")
        elif here[name][0] != saved[name].size:
            lines.append(f"{name}: saved from {saved[name].size} bytes, here {here[name][0]}")
        elif here[name][1] != saved[name].header:
            sums = f"saved {saved[name].header}, here {here[name][1]}"
            lines.append(f"{name}: other tensors (checksum of the header {sums})")
    return lines


def _contents(saved: dict[str, SourceFile], folder: Path) -> list[str]:
    here = fingerprint.source_files(folder, saved)
    return [
        f"{name}: other content (checksum saved {saved[name].checksum}, here {found.checksum})"
        for name, found in here.items()
        if found.checksum != saved[name].checksum
    ]


def _told(compare: Any) -> list[str]:
    """What `compare` finds on rank 0, on every rank."""
    if not dist.is_initialized() or get_world_group().world_size == 1:
        found: list[str] = compare()
        return found
    group = get_world_group()
    results: list[Any] = [None]
    if group.rank_in_group == 0:
        try:
            results = [compare()]
        except OSError as error:
            results = [error]
    dist.broadcast_object_list(results, src=group.ranks[0], group=group.cpu_group)
    if isinstance(results[0], OSError):
        raise results[0]
    return list(results[0])
