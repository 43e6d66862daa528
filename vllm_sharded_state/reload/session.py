"""New weights that come in calls: one transaction from upstream's `initialize_layerwise_reload` to its
`finalize_layerwise_reload`, fed by every call of the model's `load_weights` in between.

That is how weight-transfer engines (vllm/distributed/weight_transfer) and trainers update a model.
"""

from collections.abc import Iterable
from typing import Any

import torch
from torch import nn
from vllm.logger import init_logger

from vllm_sharded_state.busy import claim, release
from vllm_sharded_state.checkpoint.digest import Digest
from vllm_sharded_state.errors import (
    ReloadBrokenError,
    ReloadBusyError,
    ReloadEndedError,
    ReloadError,
    ReloadPeerError,
)
from vllm_sharded_state.state.construction import recall

from . import unsupported
from .call import running
from .entry import digests
from .peers import Agreement
from .transaction import Transaction

logger = init_logger("vllm.sharded_state.reload")


class Session:
    """Stands in the place of `model.load_weights` from the start of an update to its end.

    An error ends it, with everything taken back; it then stays, so that what is still sent is refused
    rather than loaded into the live model.
    """

    def __init__(self, model: nn.Module, vllm_config: Any, agreement: Agreement) -> None:
        """Raises `ReloadError` when new weights can't be taken now; nothing was changed then."""
        self._model = model
        self._config = vllm_config
        self._agreement = agreement
        self._transaction: Transaction | None = None
        self._failure: str | None = None
        self._held = "The engine holds the weights it had before."
        self._ended = False
        self._reading = False
        model.load_weights = self
        try:
            call = running()
            self._sent = Digest() if call.wants_digest() else None
            self._transaction = Transaction(model, vllm_config, call.wanted_atomic(model))
        except BaseException as error:
            self.fail(error)
            raise

    def __call__(self, weights: Iterable[tuple[str, torch.Tensor]]) -> Any:
        """Take `weights` in, and return what the model's `load_weights` does.

        Afterwards nothing is held of the memory that the tensors lie in. Raises `ReloadError`.
        """
        transaction = self._open()
        self._reading = True
        try:
            loaded = transaction.feed(weights if self._sent is None else self._sent.over(weights))
            transaction.own()
        except BaseException as error:
            self.fail(error)
            raise
        finally:
            self._reading = False
        return loaded

    def agree(self) -> None:
        """Wait until every rank has taken what was sent so far.

        Raises `ReloadPeerError`, undone; whoever calls ends the update then, as after any error.
        """
        transaction = self._open()
        elsewhere = self._agreement.settle()
        if elsewhere is not None:
            transaction.take_back(
                ReloadPeerError(f"Another rank could not take the new weights: {elsewhere}")
            )

    def finish(self) -> None:
        """See that everything has come, on every rank, and keep it. Raises `ReloadError`, undone."""
        if self._failure is not None:
            del self._model.load_weights  # it has been told now
        transaction = self._open()
        told: dict[str, str | list[str]] = {}
        try:
            transaction.complete()
            if self._sent is not None:
                told = digests(transaction, self._model, self._config, self._sent)
            self.agree()
        except BaseException as error:
            self.fail(error)
            raise
        del self._model.load_weights
        self._ended = True
        report = transaction.commit()
        report.digests = told
        release(self._model)
        running().report = report.as_dict()
        logger.info("Weights updated: %s", report)

    def fail(self, error: BaseException) -> None:
        """End the update because of `error`, here and on the other ranks: take everything back."""
        if self._ended:
            return
        self._ended = True
        lines = str(error).splitlines() or [""]
        self._failure = f"{type(error).__name__}: {lines[0]}"
        transaction, self._transaction = self._transaction, None
        release(self._model)
        try:
            if transaction is not None:
                self._held = transaction.abandon()
            if not isinstance(error, ReloadError):  # one of ours says so itself
                logger.warning("An update failed (%s). %s", self._failure, self._held)
        except ReloadBrokenError as broken:
            self._held = str(broken)
            raise
        finally:
            self._agreement.fail(self._failure)

    def refuse_if_reading(self) -> None:
        """Raise `ReloadBusyError` to whoever is called by what `load_weights` was given to read."""
        if self._reading:
            raise ReloadBusyError(
                "This update is still reading what a call of load_weights was given, and can't be "
                "started, continued or finished from in there."
            )

    @property
    def is_open(self) -> bool:
        """Whether more can be sent: it has neither failed nor been finished."""
        return not self._ended

    def refuse_if_failed(self) -> None:
        """Raise `ReloadEndedError` when the update has failed."""
        if self._failure is not None:
            raise ReloadEndedError(
                f"This update has failed, and can't be continued or finished: {self._failure}\n"
                f"{self._held}\nStart another one, and send all of it again."
            )

    def _open(self) -> Transaction:
        self.refuse_if_failed()
        self.refuse_if_reading()
        assert self._transaction is not None
        return self._transaction


def of(model: nn.Module) -> Session | None:
    """The update of `model` that was begun last, if it is not finished."""
    session = vars(model).get("load_weights")
    return session if isinstance(session, Session) else None


def begin(model: nn.Module) -> bool:
    """Begin an update of `model`; an earlier one that was not finished is taken back, with a warning.

    False where it can't be a transaction; then vLLM's own function has to do. Raises `ReloadError` when
    new weights can't be taken now; nothing was changed.
    """
    agreement = Agreement()
    construction = recall(model)
    if construction is None:
        reason: str | None = "it is not known from which configuration the model was built"
    else:
        reason = unsupported.update_reason(construction.vllm_config, model)
    if construction is None or reason is not None:
        logger.warning(
            "This update is vLLM's own and can't be taken back when it fails: %s", reason
        )
        return False
    abandon(model)
    claim(model, "an update that was started and is not finished")
    Session(model, construction.vllm_config, agreement)
    return True


def finish(model: nn.Module) -> bool:
    """Finish the update of `model`: False where none was begun here. Raises `ReloadError`, undone."""
    session = of(model)
    if session is None:
        return False
    session.finish()
    return True


def abandon(model: nn.Module) -> None:
    """Take back an update of `model` that was started and never finished, if there is one."""
    session = of(model)
    if session is not None and session.is_open:
        session.refuse_if_reading()
        logger.warning("An earlier update was never finished: it is taken back.")
        session.fail(ReloadEndedError("another update was started."))
