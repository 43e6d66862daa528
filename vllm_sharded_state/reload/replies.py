"""Replies of workers to calls of the executor: what nobody read after one call is not the next one's."""

from collections.abc import Iterator, Sequence
from typing import Any
from weakref import WeakKeyDictionary

#: By reply queue, how many replies are still to come out of it, up to the call that is being read.
_owed: "WeakKeyDictionary[Any, int]" = WeakKeyDictionary()


class Replies(Sequence[Any]):
    """Stands for the reply queues of all workers, for the reading of one call.

    Upstream stops at the first worker that failed, and leaves what the others reply. As each queue is
    read for one call after the other, the leftovers come first, and are dropped.
    """

    def __init__(self, queues: Sequence[Any]) -> None:
        self._queues = queues

    def __len__(self) -> int:
        return len(self._queues)

    def __getitem__(self, rank: Any) -> Any:
        """The queue of the only worker that replies."""
        return _Reply(self._queues[rank], asked=False)

    def __iter__(self) -> Iterator[Any]:
        """The queues of all workers, every one of which will reply."""
        for queue in self._queues:
            _ask(queue)
        return iter([_Reply(queue, asked=True) for queue in self._queues])


class _Reply:
    def __init__(self, queue: Any, asked: bool) -> None:
        self._queue = queue
        self._asked = asked

    def __getattr__(self, name: str) -> Any:
        return getattr(self._queue, name)  # a shutdown may come from another thread

    def dequeue(self, *args: Any, **kwargs: Any) -> Any:
        """The reply to this call; the arguments are the queue's own.

        Raises `TimeoutError`; the reply is then dropped when it comes.
        """
        if not self._asked:
            _ask(self._queue)
        while True:
            reply = self._queue.dequeue(*args, **kwargs)
            _owed[self._queue] -= 1
            if not _owed[self._queue]:
                return reply


def _ask(queue: Any) -> None:
    _owed[queue] = _owed.get(queue, 0) + 1
