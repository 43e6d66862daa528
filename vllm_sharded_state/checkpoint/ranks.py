"""The processes that save one checkpoint together, and the one thing they do: tell each other all."""

import os
import socket
import time
from pathlib import Path
from typing import Any, Protocol

from torch import distributed as dist

from vllm_sharded_state.errors import SaveError, listed


class Ranks(Protocol):
    """`rank` of this process among those of the save, and `gather`."""

    rank: int

    def gather(self, value: Any) -> list[Any]:
        """Give `value` to every rank; returns those of all, by rank. Raises `SaveError`."""


class Alone:
    """A save by one process."""

    rank = 0

    def gather(self, value: Any) -> list[Any]:
        """`value`, of the only rank."""
        return [value]


class GroupRanks:
    """The ranks of a process group on the CPU (gloo)."""

    def __init__(self, group: Any) -> None:
        self.rank = dist.get_rank(group)
        self._group = group
        self._size = dist.get_world_size(group)
        self._processes: list[tuple[str, int]] = []
        self._processes = self.gather((socket.gethostname(), os.getpid()))

    def gather(self, value: Any) -> list[Any]:
        """Give `value` to every rank. Raises `SaveError` naming ranks that ended meanwhile.

        Gloo notices at once when a process ends, and after the group's timeout when one hangs.
        """
        results: list[Any] = [None] * self._size
        try:
            dist.all_gather_object(results, value, group=self._group)
        except RuntimeError as error:
            raise SaveError(
                f"Saving stopped, because {self._culprits()}\n"
                "The directory holds the earlier checkpoint or the new one, whole. Start the engine anew."
            ) from error
        return results

    def _culprits(self) -> str:
        until = time.monotonic() + 2  # a socket closes a moment before its process is gone
        while time.monotonic() < until:
            ended = [
                f"rank {rank} (process {pid} on {host})"
                for rank, (host, pid) in enumerate(self._processes)
                if host == socket.gethostname() and not _runs(pid)
            ]
            if ended:
                return f"these ranks ended meanwhile:\n{listed(ended)}"
            time.sleep(0.05)
        return "a rank ended meanwhile or does not answer: see the other ranks' logs."


def _runs(pid: int) -> bool:
    """Whether a process of this machine runs; one that has ended may wait for its parent."""
    try:
        state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except OSError:
        return False
    return state not in ("Z", "X")
