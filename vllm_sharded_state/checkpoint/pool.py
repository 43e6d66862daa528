"""Threads that share the jobs of one read, and help each other with the last ones."""

import os
import threading
from collections import deque
from collections.abc import Callable, Sequence
from typing import Protocol

#: Threads at most: beyond, memory and disks are what waits.
MAX_THREADS = 8
#: Seconds between two reports of progress.
_INTERVAL = 0.1


class Job(Protocol):
    """A piece of work, begun by one worker."""

    def work(self, worker: "Worker") -> None:
        """Do it, to the end."""

    def help(self, worker: "Worker") -> bool:
        """Do a part of it that nobody has begun; False when none is left."""


class Worker:
    """What one thread knows: how many bytes it has read, and its shared pool."""

    def __init__(self, pool: "Pool") -> None:
        self.pool = pool
        self.bytes = 0


class StoppedError(Exception):
    """Another worker failed; what it raised is raised to the caller."""


def threads() -> int:
    """How many threads read: one for each core that this process may use, up to `MAX_THREADS`."""
    return max(1, min(MAX_THREADS, len(os.sched_getaffinity(0))))


class Pool:
    """Runs jobs in the order given. `changed` guards and announces what jobs share between workers."""

    def __init__(self, jobs: Sequence[Job]) -> None:
        self._jobs = list(jobs)
        self._queue = deque(jobs)
        self._failure: BaseException | None = None
        self._told = 0
        self.changed = threading.Condition()

    @property
    def stopped(self) -> bool:
        """Whether a worker has failed."""
        return self._failure is not None

    def run(self, count: int, progress: Callable[[int], None]) -> None:
        """Run all jobs in `count` threads, or in this one for 0; raises what a worker raised first.

        `progress` is called in this thread with the bytes that were read since: now and then while
        others read, and at the end.
        """
        workers = [Worker(self) for _ in range(max(1, count))]
        if count == 0:
            self._run(workers[0])
        else:
            self._run_threads(workers, progress)
        if self._failure is not None:
            raise self._failure
        progress(sum(worker.bytes for worker in workers) - self._told)

    def _run_threads(self, workers: list[Worker], progress: Callable[[int], None]) -> None:
        running = [
            threading.Thread(target=self._run, args=(worker,), name="vss-read")
            for worker in workers
        ]
        for thread in running:
            thread.start()
        try:
            for thread in running:
                while thread.is_alive():
                    thread.join(_INTERVAL)
                    done = sum(worker.bytes for worker in workers)
                    progress(done - self._told)
                    self._told = done
        except BaseException as error:
            self._stop(error)
            for thread in running:
                thread.join()
            raise

    def _run(self, worker: Worker) -> None:
        try:
            while not self.stopped:
                try:
                    job = self._queue.popleft()
                except IndexError:
                    break
                job.work(worker)
            for job in self._jobs:
                while not self.stopped and job.help(worker):
                    pass
        except StoppedError:
            pass
        except BaseException as error:  # noqa: BLE001 - it is raised again in the caller's thread
            self._stop(error)

    def _stop(self, error: BaseException) -> None:
        with self.changed:
            if self._failure is None:
                self._failure = error
            self.changed.notify_all()
