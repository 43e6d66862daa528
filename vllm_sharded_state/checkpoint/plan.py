"""Which jobs a read is made of: what is read together, what apart, and what one after another."""

from collections.abc import Iterable, Sequence

import torch

from . import device
from .device import Ring
from .files import MAX_BUFFERS
from .jobs import PIECE, Bounced, Chain, Damage, Item, Large, Run, aligned
from .memory import span
from .pool import Job


class Rings:
    """The ring of each device, made when it is first asked for, in the thread that plans."""

    def __init__(self) -> None:
        self._rings: dict[torch.device, Ring] = {}

    def of(self, where: torch.device) -> Ring:
        """The ring for `where`."""
        if where not in self._rings:
            self._rings[where] = Ring(device.transport(where))
        return self._rings[where]

    def finish(self) -> None:
        """Return when every copy has arrived."""
        for ring in self._rings.values():
            ring.finish()


def plan(items: Sequence[Item], rings: Rings, damage: Damage, threads: int) -> list[Job]:
    """The jobs that read `items`, none of them empty, in the order in which to begin them.

    Neighbours in a file are read together. Files are read from front to end, so that a disk is; but
    tensors that would keep one of `threads` busy at the end go first.
    """
    free, chains = _apart(items)
    jobs: list[tuple[int, Job]] = []
    for group in _neighbours(
        sorted(free, key=lambda item: (item.file.descriptor, item.place.start))
    ):
        size = group[-1].place.end - group[0].place.start
        jobs.append((size, _job(group, rings, damage)))
    for chain in chains:
        size = sum(item.size for item in chain)
        jobs.append((size, Chain([_job([item], rings, damage) for item in chain])))
    share = sum(size for size, _ in jobs) // (4 * max(1, threads))
    jobs.sort(
        key=lambda job: -job[0] if job[0] > share else 0
    )  # stable: the rest stays in file order
    return [job for _, job in jobs]


def clusters(tensors: Iterable[torch.Tensor]) -> list[list[int]]:
    """Positions of those `tensors` that may share memory with another, grouped, each group in order.

    By the range from a tensor's first element to its last: two strided ones may be grouped although
    they never meet.
    """
    ranges: dict[torch.device, list[tuple[int, int, int]]] = {}
    for position, tensor in enumerate(tensors):
        if tensor.numel():
            ranges.setdefault(tensor.device, []).append((*span(tensor), position))
    groups = []
    for found in ranges.values():
        found.sort()
        group, end = [found[0][2]], found[0][1]
        for begin, stop, position in found[1:]:
            if begin < end:
                group.append(position)
            else:
                groups.append(group)
                group = [position]
            end = max(end, stop)
        groups.append(group)
    return [sorted(group) for group in groups if len(group) > 1]


def _apart(items: Sequence[Item]) -> tuple[list[Item], list[list[Item]]]:
    """The items whose memory is their own, and groups of those that share some.

    An item that only repeats another one is left out.
    """
    shared = set()
    free: list[Item] = []
    chains: list[list[Item]] = []
    for group in clusters(item.tensor for item in items):
        shared.update(group)
        distinct: dict[tuple[object, ...], Item] = {}
        for position in group:
            item = items[position]
            where = (item.tensor.data_ptr(), item.tensor.shape, item.tensor.stride())
            # The last request for a place wins, so that one is the one to keep.
            same = (item.file.path, item.key, item.checksum, item.tensor.dtype, *where)
            distinct.pop(same, None)
            distinct[same] = item
        if len(distinct) == 1:
            free += distinct.values()
        else:
            chains.append(list(distinct.values()))
    return [item for position, item in enumerate(items) if position not in shared] + free, chains


def _neighbours(items: Sequence[Item]) -> list[list[Item]]:
    """Groups of items that follow each other in a file, go the same way, and are small together."""
    groups: list[list[Item]] = []
    room, end, file, way = 0, -1, None, None
    for item in items:
        place, size = item.place, aligned(item.size)
        here = _way(item.tensor)
        if (
            place.start == end
            and size <= room
            and here == way
            and item.file is file
            and len(groups[-1]) < MAX_BUFFERS
        ):
            groups[-1].append(item)
            room -= size
        else:
            groups.append([item])
            room = PIECE - size
            file, way = item.file, here
        end = place.end
    return groups


def _way(tensor: torch.Tensor) -> torch.device | None:
    """None where bytes are read straight into the tensor's memory; else the device to copy to."""
    if tensor.is_cpu and tensor.is_contiguous() and not tensor.is_conj() and not tensor.is_neg():
        return None
    return tensor.device


def _job(items: Sequence[Item], rings: Rings, damage: Damage) -> Run | Large | Bounced:
    where = _way(items[0].tensor)
    if where is not None:
        return Bounced(items, damage, rings.of(where))
    if len(items) == 1 and items[0].size > PIECE:
        return Large(items[0], damage)
    return Run(items, damage)
