"""Weights that `sleep(level=2)` threw away: a model is sent whole then, and nothing can be given back.

After `wake_up` their memory is there again and holds anything. Buffers and the parameters that
`sleep_preserve_parameter_names` names are kept by upstream.
"""

from collections.abc import Collection, Iterable
from typing import Any
from weakref import WeakKeyDictionary

from torch import nn
from vllm.platforms import current_platform

from vllm_sharded_state.errors import ReloadIncompleteError, listed
from vllm_sharded_state.state import units
from vllm_sharded_state.state.compare import place
from vllm_sharded_state.state.walk import Kind, Leaf

#: What an error says in place of `The engine holds the weights it had before.`
SAID = (
    "sleep(level=2) threw the weights away that the model had before: there is nothing to generate "
    "with until a whole model has been sent."
)

#: Models that lost weights, each with the ids of the parameters that it keeps.
_kept: "WeakKeyDictionary[nn.Module, frozenset[int]]" = WeakKeyDictionary()


def tell(executor: Any) -> None:
    """Let every worker of `executor`, which was sent to sleep at level 2, know what that means."""
    executor.collective_rpc(note)


def note(worker: Any) -> None:
    """Note what vLLM's `Worker.sleep` threw away; the CPU's does nothing, and says so."""
    if not current_platform.is_cpu():
        lose(worker.get_model(), worker._sleep_saved_parameters)


def lose(model: nn.Module, saved: Collection[str]) -> None:
    """Note that the parameters of `model` hold anything, but for those that `saved` names."""
    _kept[model] = frozenset(
        id(parameter) for name, parameter in model.named_parameters() if name in saved
    )


def is_lost(model: nn.Module) -> bool:
    """Whether `model` waits for weights in the place of those it lost."""
    return model in _kept


def refuse_units_unsent(model: nn.Module, done: Collection[str]) -> None:
    """`refuse_unsent` for all that `model` holds but for the units `done`, and what lies in theirs."""
    if not is_lost(model):
        return
    new, rest = set(), []
    for unit, leaves in units.all_leaves(model):
        tensors = [leaf for leaf in leaves.values() if leaf.is_tensor]
        if unit.name in done:
            new |= {place(leaf.value) for leaf in tensors if leaf.value.numel()}
        else:
            rest += tensors
    refuse_unsent(model, [leaf for leaf in rest if place(leaf.value) not in new])


def refuse_unsent(model: nn.Module, leaves: Iterable[Leaf]) -> None:
    """Raise `ReloadIncompleteError` when any of `leaves`, tensors of `model`, was thrown away."""
    if not is_lost(model):
        return
    gone = [leaf.path for leaf in leaves if _is_gone(leaf, _kept[model])]
    if gone:
        raise ReloadIncompleteError(
            f"sleep(level=2) threw these away, and they were not sent:\n{listed(gone)}\n"
            "Send the whole model."
        )


def _is_gone(leaf: Leaf, kept: frozenset[int]) -> bool:
    if leaf.kind is Kind.PARAMETER:
        return id(leaf.value) not in kept
    # What is neither parameter nor buffer is kept by nobody.
    return leaf.kind is Kind.ATTRIBUTE and leaf.value.device.type != "cpu"


def found(model: nn.Module) -> None:
    """A whole model has come in the place of what was lost."""
    _kept.pop(model, None)
