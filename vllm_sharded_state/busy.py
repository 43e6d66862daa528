"""Models that new weights are being put into: meanwhile nothing else may change or save them."""

from weakref import WeakKeyDictionary

from torch import nn

from .errors import ReloadBusyError

_busy: "WeakKeyDictionary[nn.Module, str]" = WeakKeyDictionary()


def claim(model: nn.Module, what: str) -> None:
    """Note that `what` is changing `model`. Raises `ReloadBusyError` when something else is."""
    refuse(model)
    _busy[model] = what


def release(model: nn.Module) -> None:
    """What `claim` noted is done."""
    _busy.pop(model, None)


def refuse(model: nn.Module) -> None:
    """Raise `ReloadBusyError` while `model` takes new weights: it may hold old and new ones."""
    if model in _busy:
        raise ReloadBusyError(f"This model is taking new weights already ({_busy[model]}).")
