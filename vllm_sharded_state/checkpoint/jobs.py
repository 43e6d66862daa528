"""How tensors are read: straight into their memory, or through buffers where that can't be.

A tensor's checksum is computed piece by piece, each right after it was read, while it is still in the
processor's cache. System calls and the hash release the interpreter's lock.
"""

from collections.abc import Sequence
from typing import Any

import msgspec
import torch

from .checksum import Hash, checksum
from .device import Lane, Ring
from .files import PartFile
from .header import Place
from .memory import flat, slabs
from .pool import StoppedError, Worker

#: Bytes that are read at a time and hashed right after.
PIECE = 1 << 20
#: Bytes of a large tensor that one worker takes at a time.
SEGMENT = 8 << 20


class Item(
    msgspec.Struct, gc=False
):  # not followed by the collector: 50,000 of them cost it dearly
    """One tensor to read: where its bytes lie, what their checksum is (None: not compared), where to."""

    file: PartFile
    key: str
    place: Place
    checksum: str | None
    tensor: torch.Tensor

    @property
    def size(self) -> int:
        """Its size in bytes."""
        return self.place.end - self.place.start


class Damage:
    """The items whose bytes are not those that were saved."""

    def __init__(self) -> None:
        self.items: list[Item] = []


class Run:
    """Small tensors that are neighbours in a file, read in one system call into the host's memory."""

    def __init__(self, items: Sequence[Item], damage: Damage) -> None:
        self._items = items
        self._damage = damage

    def work(self, worker: Worker) -> None:
        """Read all of them, then compare their checksums."""
        buffers = [flat(item.tensor) for item in self._items]
        first = self._items[0]
        first.file.read(first.place.start, buffers, first.key)
        for item, buffer in zip(self._items, buffers, strict=True):
            if item.checksum is not None and checksum(buffer) != item.checksum:
                self._damage.items.append(item)
        worker.bytes += self._items[-1].place.end - first.place.start

    def help(self, worker: Worker) -> bool:
        """One call can't be shared."""
        return False


class Large:
    """A tensor that fills several pieces of the host's memory.

    The worker that begins it computes the checksum, which goes from the first byte to the last; others,
    once they have nothing else to do, read segments ahead of it.
    """

    def __init__(self, item: Item, damage: Damage) -> None:
        self._item = item
        self._damage = damage
        self._memory: Any = flat(item.tensor)
        self._count = -(-item.size // SEGMENT)
        self._claimed = 0
        self._ready: set[int] = set()

    def work(self, worker: Worker) -> None:
        """Take segments until none is left; compare the checksum."""
        digest = None if self._item.checksum is None else Hash()
        for index in range(self._count):
            with worker.pool.changed:
                mine = self._claimed == index
                if mine:
                    self._claimed += 1
            if mine:
                self._read(index, worker, digest)
            elif digest is not None:
                self._wait(index, worker)
                digest.update(self._memory[index * SEGMENT : (index + 1) * SEGMENT])
        if digest is not None and digest.hexdigest() != self._item.checksum:
            self._damage.items.append(self._item)

    def help(self, worker: Worker) -> bool:
        """Read the next segment that nobody has begun."""
        with worker.pool.changed:
            index = self._claimed
            if index >= self._count:
                return False
            self._claimed += 1
        self._read(index, worker, None)
        with worker.pool.changed:
            self._ready.add(index)
            worker.pool.changed.notify_all()
        return True

    def _read(self, index: int, worker: Worker, digest: Any) -> None:
        item = self._item
        end = min(item.size, (index + 1) * SEGMENT)
        for start in range(index * SEGMENT, end, PIECE):
            piece = self._memory[start : min(end, start + PIECE)]
            item.file.read_one(item.place.start + start, piece, item.key)
            if digest is not None:
                digest.update(piece)
            worker.bytes += len(piece)

    def _wait(self, index: int, worker: Worker) -> None:
        with worker.pool.changed:
            worker.pool.changed.wait_for(lambda: index in self._ready or worker.pool.stopped)
        if worker.pool.stopped:
            raise StoppedError


class Bounced:
    """Tensors of one device, or strided ones, read through the buffers of a ring.

    They are neighbours in a file and fit into one buffer together, or it is one of any size.
    """

    def __init__(self, items: Sequence[Item], damage: Damage, ring: Ring) -> None:
        self._items = items
        self._damage = damage
        self._ring = ring

    def work(self, worker: Worker) -> None:
        """Read and compare them; the copies end when the ring is finished."""
        with self._ring.lane() as lane:
            if len(self._items) == 1:
                self._one(self._items[0], lane, worker)
            else:
                self._several(lane, worker)

    def help(self, worker: Worker) -> bool:
        """Buffers are filled by one worker."""
        return False

    def _one(self, item: Item, lane: Lane, worker: Worker) -> None:
        digest = Hash()
        offset = item.place.start
        for slab in slabs(item.tensor, lane.size):
            buffer = lane.take()[: slab.nbytes]
            memory: Any = flat(buffer)
            for start in range(0, len(memory), PIECE):
                piece = memory[start : start + PIECE]
                item.file.read_one(offset, piece, item.key)
                if item.checksum is not None:
                    digest.update(piece)
                offset += len(piece)
                worker.bytes += len(piece)
            lane.send([(slab, buffer)])
        if item.checksum is not None and digest.hexdigest() != item.checksum:
            self._damage.items.append(item)

    def _several(self, lane: Lane, worker: Worker) -> None:
        buffer = lane.take()
        memory: Any = flat(buffer)
        places, offset = [], 0
        for item in self._items:
            places.append((offset, offset + item.size))
            offset = aligned(offset + item.size)
        pieces = [memory[start:end] for start, end in places]
        first = self._items[0]
        first.file.read(first.place.start, pieces, first.key)
        for item, piece in zip(self._items, pieces, strict=True):
            if item.checksum is not None and checksum(piece) != item.checksum:
                self._damage.items.append(item)
        lane.send(
            [
                (item.tensor, buffer[start:end])
                for item, (start, end) in zip(self._items, places, strict=True)
            ]
        )
        worker.bytes += self._items[-1].place.end - first.place.start


class Chain:
    """Jobs whose tensors share memory, done one after another in the order of the requests."""

    def __init__(self, jobs: Sequence[Run | Large | Bounced]) -> None:
        self._jobs = jobs

    def work(self, worker: Worker) -> None:
        """Do them in order."""
        for job in self._jobs:
            job.work(worker)

    def help(self, worker: Worker) -> bool:
        """Others could overtake."""
        return False


def aligned(offset: int) -> int:
    """The next place in a buffer where an element of any dtype may begin."""
    return -(-offset // 16) * 16
