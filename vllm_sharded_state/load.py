"""Directory to model: refuse what does not belong here, fill, let upstream process, put the rest back."""

from typing import Any

from torch import nn
from vllm.logger import init_logger

from . import admission, options, remote, stock
from .checkpoint import collector
from .errors import RestoreError
from .options import Options
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
    admission.refuse_other_source(found, location, asked)
    use_tqdm = loader.load_config.use_tqdm_on_load
    restorer: Restorer | stock.StockRestorer
    if found is None:
        restorer = stock.StockRestorer(location, loader.pattern, vllm_config, asked, use_tqdm)
    else:
        saved = admission.open_rank(found, location, vllm_config, loader.pattern, asked)
        restorer = Restorer(saved, use_tqdm)
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
