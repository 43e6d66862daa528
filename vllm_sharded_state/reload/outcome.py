"""What a model holds after a reload that failed, as its error says."""

from collections.abc import Sequence

from torch import nn

from vllm_sharded_state.errors import ShardedStateError, listed

from . import lost


def said(model: nn.Module, new: Sequence[str]) -> str:
    """What `model` holds now, of which the units `new` were not taken back."""
    if lost.is_lost(model):
        return lost.SAID
    if not new:
        return "The engine holds the weights it had before."
    return f"These units hold new weights, all others their old ones:\n{listed(new)}"


def tell(error: BaseException, model: nn.Module, new: Sequence[str]) -> None:
    """Add to one of our errors what `said` says, and whether `model` holds anything new."""
    if isinstance(error, ShardedStateError):
        error.changed = bool(new)
        error.args = (f"{error}\n{said(model, new)}",)
