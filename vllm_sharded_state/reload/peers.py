"""All ranks of an engine take new weights, or none does."""

import itertools
from datetime import timedelta
from typing import Any

import torch
from torch.distributed.distributed_c10d import _get_default_store
from vllm.distributed import parallel_state

#: How long a rank waits for the others at the end of one call, in seconds: they do the same work.
PATIENCE_S = 120.0


def failures(error: BaseException | None) -> list[str]:
    """What failed on other ranks; every rank calls this once for each reload, with its own `error`.

    A collective over the engine's ranks, on the host; without other ranks nothing is exchanged.
    """
    group = _group()
    if group is None:
        return []
    said = None if error is None else f"{type(error).__name__}: {error}"
    everybody: list[str | None] = [None] * group.world_size
    torch.distributed.all_gather_object(everybody, said, group=group.cpu_group)
    return [
        f"rank {rank}: {text.splitlines()[0]}"
        for rank, text in enumerate(everybody)
        if text is not None and rank != group.rank_in_group
    ]


class Agreement:
    """What the ranks decide about an update that comes in calls: all keep what came, or none does.

    A rank that fails is not heard of in a collective, for it may never come to the next one. Each step
    is decided in the store that the ranks met at, by the first to say so: the last one to arrive, that
    all have; one that failed; or one that has waited for too long. Every rank makes one of these for
    each update, in the same order.
    """

    #: The step that was decided last, of any update.
    _last: str | None = None

    def __init__(self) -> None:
        self._number = next(_numbers)
        self._step = 0

    def fail(self, said: str) -> None:
        """Let the others know that this rank has taken everything back, and why."""
        store = _store()
        if store is not None:
            rank = parallel_state.get_world_group().rank_in_group
            store.compare_set(self._key(), "", f"rank {rank}: {said}")

    def settle(self) -> str | None:
        """Wait until all ranks have come as far; what failed on one of them, or None.

        Without other ranks nothing is exchanged. Raises `RuntimeError` when the store can't be reached.
        """
        store = _store()
        if store is None:
            return None
        group, key = parallel_state.get_world_group(), self._key()
        if store.add(_arrivals(key), 1) == group.world_size:
            store.compare_set(key, "", _ALL)
            self._forget_last(store)
        try:
            store.wait([key], timedelta(seconds=PATIENCE_S))
        except RuntimeError:  # how stores tell that the time is over; one that is gone raises again
            waited = f"rank {group.rank_in_group}: waited {PATIENCE_S:.0f} s for the other ranks"
            store.compare_set(key, "", waited)
        decision = store.get(key).decode()
        self._step += 1
        Agreement._last = key
        return None if decision == _ALL else decision

    def _key(self) -> str:
        return f"vss/update/{self._number}/{self._step}"

    @staticmethod
    def _forget_last(store: Any) -> None:
        """Remove the step before from the store: every rank has come further."""
        if Agreement._last is not None:
            store.delete_key(Agreement._last)
            store.delete_key(_arrivals(Agreement._last))


def _arrivals(key: str) -> str:
    return f"{key}/arrived"


_ALL = "all"
_numbers = itertools.count()


def _group() -> Any:
    """All ranks of the engine; None without other ranks."""
    if not (torch.distributed.is_available() and torch.distributed.is_initialized()):
        return None
    group = parallel_state.get_world_group()
    return group if group.world_size > 1 else None


def _store() -> Any:
    """Where the ranks met; None without other ranks."""
    return None if _group() is None else _get_default_store()
