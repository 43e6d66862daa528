"""Directory to model: refuse what does not belong here, fill, let upstream process, put the rest back."""

from typing import Any

from torch import nn
from vllm.logger import init_logger
from vllm.model_executor.model_loader.sharded_state_loader import ShardedStateLoader

from . import identity, options, remote, source_identity, stock
from .checkpoint import collector, manifest, staging
from .checkpoint.manifest import Manifest, RankEntry
from .checkpoint.writing import strange_names
from .errors import IncompleteError, ManifestError, RestoreError, listed
from .options import Options
from .remote import Location
from .restore import Restorer

logger = init_logger("vllm.sharded_state.load")

take_options = options.take


def retie(model_config: Any) -> bool | None:
    """Whether the manifest at `model_config.model` says that word embeddings are tied; else None.

    A key `lm_head.weight` in a part says nothing about it: one tensor may lie under either name. Not
    asked where the config says that they are not tied: nothing would be changed.
    """
    if not getattr(model_config.hf_config, "tie_word_embeddings", False):
        return None
    token = getattr(model_config, "hf_token", None)
    found = remote.cached_manifest(str(model_config.model), model_config.revision, token)
    return None if found is None else found.tied_word_embeddings


def load_model(
    loader: Any, vllm_config: Any, model_config: Any, prefix: str, upstream: Any
) -> nn.Module:
    """Load a model from sharded state; `upstream` is the loader's own `load_model`, bound.

    Upstream builds the model, calls `load_weights` (see below) and processes it; then what processing
    can't give is put back. A directory without a manifest was saved by stock vLLM.

    Raises `ShardedStateError`: everything that can be refused without the model is refused before it
    is built.
    """
    location = remote.locate(loader.load_config, model_config)
    asked: Options = getattr(loader, "vss_options", Options())
    with collector.paused():
        found = location.manifest()
    if asked.source is not None:
        source_identity.refuse_other(
            None if found is None else found.source,
            asked.source,
            remote.local_folder(asked.source, None),
            location,
        )
    use_tqdm = loader.load_config.use_tqdm_on_load
    restorer: Restorer | stock.StockRestorer
    if found is None:
        restorer = stock.StockRestorer(location, loader.pattern, vllm_config, asked, use_tqdm)
    else:
        _refuse_waiting(location, found)
        entry = _entry(found, location, vllm_config, loader.pattern)
        reader = location.open(entry.files, found.save_id, asked.verify)
        with collector.paused():
            restorer = Restorer(location, entry, reader, asked, use_tqdm)
        if not found.tied_word_embeddings:
            _untie(model_config)
    loader.vss_restorer = restorer
    try:
        model = upstream(vllm_config, model_config, prefix)
        with collector.paused():
            restorer.after_processing(model, vllm_config)
    finally:
        restorer.close()
        del loader.vss_restorer
    return model


def load_weights(loader: Any, model: nn.Module, model_config: Any, upstream: Any) -> None:
    """Fill `model`, built but not processed, as far as that can be done before processing.

    Raises `RestoreError` when it is not `load_model` that calls: the rest could never be put back.
    """
    restorer = getattr(loader, "vss_restorer", None)
    if restorer is None:
        raise RestoreError(
            "Sharded state can't be loaded into a model that exists already: what processing makes of "
            "the weights has to be put back afterwards.\nStart a new engine with "
            "load_format='sharded_state'."
        )
    with collector.paused():
        restorer.before_processing(model)


def _untie(model_config: Any) -> None:
    """Build `lm_head` as a tensor of its own although the config says that it is tied.

    Upstream decides so for a checkpoint that holds a different `lm_head`, but not for this load format
    (`ModelConfig.maybe_untie_word_embeddings`, called in vllm/config/vllm.py).
    """
    for config in (model_config.hf_config, model_config.hf_config.get_text_config()):
        if getattr(config, "tie_word_embeddings", False):
            config.tie_word_embeddings = False


def _entry(found: Manifest, location: Location, vllm_config: Any, pattern: str | None) -> RankEntry:
    """This rank's entry, when the checkpoint belongs to this engine."""
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


def _refuse_waiting(location: Location, found: Manifest) -> None:
    """Raise `IncompleteError` where the engine may have been configured by an earlier save's files."""
    folder = location.folder
    waiting = staging.waiting_side_files(folder, found.save_id) if folder else []
    if waiting:
        raise IncompleteError(
            f"A save into {location} was killed in its last step: its weights can be read, but these "
            f"files are still those of the checkpoint before it:\n{listed(waiting)}\n"
            f"Complete it: python -m vllm_sharded_state.checkpoint.staging {location}"
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
