"""What stands for upstream's `reload_weights`: from tensors or from a path, in either format."""

import copy
import functools
import os
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import torch
from torch import nn
from vllm.logger import init_logger
from vllm.model_executor.model_loader import get_model_loader

from vllm_sharded_state import held
from vllm_sharded_state.busy import claim, release
from vllm_sharded_state.checkpoint.digest import Digest
from vllm_sharded_state.checkpoint.manifest import FILE_NAME
from vllm_sharded_state.errors import (
    ReloadError,
    ReloadPeerError,
    ReloadSourceError,
    listed,
)
from vllm_sharded_state.state.digest import state_digest

from . import peers
from .call import running
from .kernel_format import KernelFormat
from .report import Report
from .sharded import ShardedTransaction
from .transaction import Transaction

logger = init_logger("vllm.sharded_state.reload")

Weights = Iterable[tuple[str, torch.Tensor]]


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
    `weights_path` is read, or the model's own, be it in the model's own format or sharded state;
    `vllm_config.model_config` then names `weights_path`, once all is done.

    What the call chooses beside them (`call.Call`) holds, or the environment. Its `report` is what this
    returns. With digests it has `sent`, of the names and tensors that came, in whatever order (as
    `vllm_sharded_state.digest` gives it; of a sharded state nothing is sent), and what `state_digest`
    gives of the model that there is now.

    Raises:
        ReloadError: one of its kinds; the model holds what it held before, unless
            `VSS_RELOAD_ATOMIC=layer`, when the error tells which layers are new.
        ShardedStateError: a sharded state is not this model's, not whole, or not for here; the same.
    """
    claim(model, "reload_weights")
    call = running()
    try:
        transaction: Any = None
        commit, error, sent = None, None, None
        try:
            kind: Any = Transaction if is_checkpoint_format else KernelFormat
            if weights_iterator is None:
                kind, weights_iterator, commit = _from_path(vllm_config, model, weights_path)
            if call.wants_digest():
                sent = Digest()
                weights_iterator = sent.over(weights_iterator)
            transaction = kind(model, vllm_config, call.wanted_atomic(model))
            transaction.feed(weights_iterator)
            transaction.complete()
            found = {} if sent is None else digests(transaction, model, vllm_config, sent)
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
        report.digests = found
        call.report = report.as_dict()
    finally:
        release(model)
    logger.info("Weights reloaded: %s", report)
    return report


def refuse_sharded_state(vllm_config: Any, path: str | None, reason: str) -> None:
    """Raise `ReloadSourceError` where vLLM's own reload would take a sharded state for a checkpoint.

    `reason` tells why this model is left to it; the other arguments are those of `reload_weights`.
    """
    config = _named(vllm_config.model_config, path)
    if held.sharded_state(vllm_config.load_config, config) is not None:
        raise ReloadSourceError(
            f"{config.model} holds a sharded state, which this model can't take while it runs: {reason}. "
            "Start the engine from it."
        )


def digests(
    transaction: Any, model: nn.Module, vllm_config: Any, sent: Digest
) -> dict[str, str | list[str]]:
    """What the report says of what was sent, and of what there is now. Raises `ReloadError`, undone."""
    try:
        state = state_digest(model, vllm_config)
    except Exception as error:  # noqa: BLE001 - it runs the model's kernels
        transaction.take_back(ReloadError(f"The digest failed: {type(error).__name__}: {error}"))
    if isinstance(transaction, ShardedTransaction):
        return state
    return {"sent": sent.hexdigest(), **state}


def _from_path(vllm_config: Any, model: nn.Module, path: str | None) -> tuple[Any, Weights, Any]:
    """The kind of transaction for what lies at `path`, what is fed to it, and what makes `vllm_config`
    name it. Without a path, what `vllm_config` names already.
    """
    if path is not None:
        _refuse_missing(path)
    load_config = vllm_config.load_config
    config = _named(vllm_config.model_config, path)

    def commit() -> None:
        _name(vllm_config.model_config, path)

    found = held.sharded_state(load_config, config)
    if found is not None:
        return functools.partial(ShardedTransaction, found), (), commit
    if held.has_parts_alone(load_config, Path(str(config.model))):
        raise ReloadSourceError(
            f"{config.model} holds parts of a sharded state and no {FILE_NAME}, so that what they are "
            "can't be proved.\nSave it again with this package, or name the model's own checkpoint."
        )
    loader: Any = get_model_loader(load_config)
    if not hasattr(loader, "get_all_weights"):
        loader = get_model_loader(held.as_auto(load_config))
    return Transaction, loader.get_all_weights(config, model), commit


def _named(model_config: Any, path: str | None) -> Any:
    """A copy of `model_config` that names `path`."""
    config = copy.copy(model_config)
    _name(config, path)
    return config


def _name(model_config: Any, path: str | None) -> None:
    """As upstream: what is set beside the name belongs to the model that is being left."""
    if path is not None:
        model_config.model, model_config.model_weights, model_config.revision = path, "", None


def _refuse_missing(path: str) -> None:
    """A path on this machine has to be there; anything else is a name in a hub, or in a store."""
    if (path.startswith(("/", "./", "../", "~")) or os.path.isdir(path)) and not os.path.isdir(
        os.path.expanduser(path)
    ):
        raise ReloadSourceError(f"There is no directory {path}. Nothing was changed.")
