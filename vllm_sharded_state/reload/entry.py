"""What stands for upstream's `reload_weights`: from tensors or from a path, in either format."""

import copy
import os
from collections.abc import Iterable
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import nn
from vllm.logger import init_logger
from vllm.model_executor.model_loader import get_model_loader

from vllm_sharded_state.checkpoint.digest import Digest
from vllm_sharded_state.errors import (
    ReloadBusyError,
    ReloadPeerError,
    ReloadSourceError,
    listed,
)
from vllm_sharded_state.state.digest import state_digest

from . import lost, peers
from .call import running
from .kernel_format import KernelFormat
from .report import Report
from .transaction import Transaction

logger = init_logger("vllm.sharded_state.reload")

Weights = Iterable[tuple[str, torch.Tensor]]

#: Models that new weights are being loaded into.
_busy: "WeakKeyDictionary[nn.Module, str]" = WeakKeyDictionary()


def reload_weights(
    vllm_config: Any,
    model: nn.Module,
    weights_iterator: Weights | None,
    weights_path: str | None,
    is_checkpoint_format: bool,
) -> Report:
    """Put new weights into `model`, whole or not at all; the arguments are upstream's.

    `weights_iterator` gives names with tensors as the model's checkpoint has them, or, where
    `is_checkpoint_format` is false, as the running model has them. Without it the checkpoint at
    `weights_path` is read, or the model's own; `vllm_config.model_config` then names `weights_path`, once
    all is done.

    What the call chooses beside them (`call.Call`) holds, or the environment. Its `report` is what this
    returns; with digests it has `sent`, of the names and tensors that came, in whatever order (as
    `vllm_sharded_state.digest` gives it), and what `state_digest` gives of the model that there is now.

    Raises:
        ReloadError: one of its kinds; the model holds what it held before, unless
            `VSS_RELOAD_ATOMIC=layer`, when the error tells which layers are new.
    """
    claim(model, "reload_weights")
    call = running()
    try:
        transaction: Any = None
        commit, error, sent = None, None, None
        try:
            if weights_iterator is None:
                is_checkpoint_format = True
                weights_iterator, commit = _from_path(vllm_config, model, weights_path)
            kind: Any = Transaction if is_checkpoint_format else KernelFormat
            if call.wants_digest():
                sent = Digest()
                weights_iterator = sent.over(weights_iterator)
            # Of weights that are lost there is nothing to keep.
            atomic = "layer" if lost.is_lost(model) else call.wanted_atomic()
            transaction = kind(model, vllm_config, atomic)
            transaction.feed(weights_iterator)
            transaction.complete()
        except BaseException as raised:  # noqa: BLE001 - the other ranks have to know of any
            error = raised
        elsewhere = peers.failures(error)
        if error is not None:
            raise error
        if elsewhere:
            transaction.take_back(
                ReloadPeerError(f"Other ranks could not take the new weights:\n{listed(elsewhere)}")
            )
        report: Report = transaction.commit()
        if commit is not None:
            commit()
        if sent is not None:
            report.digests = {"sent": sent.hexdigest(), **state_digest(model, vllm_config)}
        call.report = report.as_dict()
    finally:
        release(model)
    logger.info("Weights reloaded: %s", report)
    return report


def claim(model: nn.Module, what: str) -> None:
    """Note that `what` is changing `model`. Raises `ReloadBusyError` when something else is."""
    if model in _busy:
        raise ReloadBusyError(f"This model is taking new weights already ({_busy[model]}).")
    _busy[model] = what


def release(model: nn.Module) -> None:
    """What `claim` noted is done."""
    _busy.pop(model, None)


def _from_path(vllm_config: Any, model: nn.Module, path: str | None) -> tuple[Weights, Any]:
    """The tensors of a checkpoint, and what makes `vllm_config` name it."""
    config = vllm_config.model_config
    load_config = vllm_config.load_config
    if path is not None:
        _refuse_missing(path)
        config = copy.copy(config)
        # As upstream: these belong to the model that is being left.
        config.model, config.model_weights, config.revision = path, "", None
    loader: Any = get_model_loader(load_config)
    if not hasattr(loader, "get_all_weights") and path is not None:
        load_config = copy.copy(load_config)
        load_config.load_format, load_config.model_loader_extra_config = "auto", {}
        loader = get_model_loader(load_config)
    if not hasattr(loader, "get_all_weights"):
        raise ReloadSourceError(
            f"load format {load_config.load_format!r} has no checkpoint in the model's own format to "
            "read again. Name one with weights_path, or send the tensors."
        )

    def commit() -> None:
        if path is not None:
            real = vllm_config.model_config
            real.model, real.model_weights, real.revision = path, "", None

    return loader.get_all_weights(config, model), commit


def _refuse_missing(path: str) -> None:
    """A path on this machine has to be there; anything else is a name in a hub, or in a store."""
    if (path.startswith(("/", "./", "../", "~")) or os.path.isdir(path)) and not os.path.isdir(
        os.path.expanduser(path)
    ):
        raise ReloadSourceError(f"There is no directory {path}. Nothing was changed.")
    if os.path.exists(os.path.join(path, "sharded_state.json")):
        raise ReloadSourceError(
            f"{path} holds a sharded state, which can't be reloaded yet. Name the checkpoint it was "
            "saved from, or start the engine from it."
        )
