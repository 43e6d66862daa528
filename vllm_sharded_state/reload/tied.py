"""Tensors of a running model that go under several names: word embeddings and the head tied to them.

Upstream ties in two ways. A model's constructor does where its configuration says so; then the twin is
tied too, and the model's `load_weights` passes over the second name. Or the checkpoint has both tensors
and they turn out equal, so that `maybe_retie_word_embeddings` (model_loader/weight_tying.py) ties them
after loading; then the twin has two, which are loaded and processed apart. Either way what is sent under
the first name counts, and another name may only repeat it.
"""

from collections.abc import Mapping

import torch
from torch import nn

from vllm_sharded_state.errors import ReloadIncompleteError, ReloadUnexpectedError
from vllm_sharded_state.state.compare import place
from vllm_sharded_state.state.recording import Recording
from vllm_sharded_state.state.twin import source_parameters
from vllm_sharded_state.state.units import Unit


class Tied:
    """Which units of the live model hold one tensor, and which names of the twin mean one.

    shared: the live tensors that several units hold, under each of their keys.
    """

    def __init__(self, live: Mapping[str, Unit], twin: nn.Module) -> None:
        self._twin = dict(twin.named_parameters(remove_duplicate=False))
        self._first = {id(tensor): name for name, tensor in twin.named_parameters()}
        self._live = {name: source_parameters(unit) for name, unit in live.items()}
        holders: dict[tuple[object, ...], list[str]] = {}
        for name, tensors in self._live.items():
            for where in {place(t) for t in tensors.values() if t.numel() and not t.is_meta}:
                holders.setdefault(where, []).append(name)
        self._groups = [names for names in holders.values() if len(names) > 1]
        self.shared = {
            key: tensor
            for tensors in self._live.values()
            for key, tensor in tensors.items()
            if len(holders.get(place(tensor), ())) > 1
        }

    def followers(self, done: set[str]) -> list[str]:
        """Units outside `done` that hold a tensor of one in `done`, and so its new content.

        Raises `ReloadIncompleteError` when another unit than the first was sent, or when there is more
        to such a unit than what it shares.
        """
        found: list[str] = []
        for first, *others in self._groups:
            if done.isdisjoint((first, *others)):
                continue
            missing = [first] if first not in done else []
            late = [name for name in others if name not in done]
            missing += [key for name in late for key in self._live[name] if key not in self.shared]
            if missing:
                raise ReloadIncompleteError(
                    f"{first} and {', '.join(others)} hold one tensor, and a part was sent. Send "
                    f"{', '.join(missing)} too."
                )
            found += late
        return found

    @property
    def repeated(self) -> frozenset[str]:
        """The names of the twin under which a tensor goes that has another name before."""
        return frozenset(n for n, tensor in self._twin.items() if self._first[id(tensor)] != n)

    def refuse_others(self, unplaced: Mapping[str, torch.Tensor], recording: Recording) -> None:
        """See that what was sent under a second name of a tensor is what the model holds now.

        `unplaced` is what no weight loader took, by name. Raises `ReloadUnexpectedError`.
        """
        for name, tensor in unplaced.items():
            parameter = self._twin.get(name)
            first = None if parameter is None else self._first[id(parameter)]
            if parameter is None or first is None or first == name:
                continue
            live = next(
                (tensors[first] for tensors in self._live.values() if first in tensors), None
            )
            if live is None or not _loads_as(tensor, live, parameter, recording):
                raise ReloadUnexpectedError(
                    f"{name} is one tensor with {first} in the running model, and was sent with another "
                    f"content.\nSend {first}. A model in which they differ needs an engine of its own."
                )


def _loads_as(
    tensor: torch.Tensor, live: torch.Tensor, parameter: torch.Tensor, recording: Recording
) -> bool:
    """Whether the weight loader of `parameter` makes of `tensor` what `live` holds."""
    if (live.shape, live.dtype) != (parameter.shape, parameter.dtype):
        return False
    sent = recording.stand_in(torch.zeros_like(live), parameter)
    try:
        sent.weight_loader(sent, tensor)
    except Exception:  # noqa: BLE001 - a loader refuses another shape in its own way
        return False
    return torch.equal(sent.detach(), live.detach())
