"""The protocol of a save: all ranks write, all succeed or none, and one rename publishes.

1. Rank 0 takes the lock, clears what dead saves left, and gives the save its id.
2. Every rank stages its files and flushes them, rank 0 the side files too.
3. Rank 0 stages the journal and the manifest, and renames the manifest into place. Before that moment
   the directory holds the earlier checkpoint, untouched; from then on the new one.
4. The files get their names, and those of the earlier checkpoint go.

After each step every rank hears how all fared. A rank that can't tell whether the save was published,
because another one ended, leaves its files where they are: the next save completes or removes them.
"""

import logging
import os
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeVar

from vllm_sharded_state.errors import SaveError, ShardedStateError, listed

from . import manifest, staging
from .lock import SaveLock
from .ranks import Ranks

logger = logging.getLogger("vllm.sharded_state.checkpoint.transaction")

T = TypeVar("T")

_COMPLETE = "python -m vllm_sharded_state.checkpoint.staging"


@dataclass
class Written:
    """What one rank staged: its entry of the manifest, its files, and older ones in their way."""

    entry: Any
    files: set[str]
    replaced: set[str] = field(default_factory=set)


def replace(
    directory: Path,
    ranks: Ranks,
    write: Callable[[str], Written],
    describe: Callable[[list[Any], str], bytes],
) -> None:
    """Replace what `directory` holds by a new checkpoint, or leave it as it is; every rank calls it.

    `write(save_id)` stages the files of this rank under `staging.staged` names, flushed;
    `describe(entries, save_id)`, called on rank 0, gives the bytes of the manifest.

    Raises what `write` raised, `OSError` as `SaveError`; on the other ranks a `SaveError` that names the
    rank which failed, or which ended.
    """
    _Save(directory, ranks).run(write, describe)


class _Save:
    def __init__(self, directory: Path, ranks: Ranks) -> None:
        self._directory = directory
        self._ranks = ranks
        self._first = ranks.rank == 0
        self._lock = SaveLock(directory)
        self._id = ""
        #: Whether the save may be, or become, the published one for all that this rank knows.
        self._in_doubt = False
        #: Whether every rank is known to have left the step before.
        self._agreed = True

    def run(
        self, write: Callable[[str], Written], describe: Callable[[list[Any], str], bytes]
    ) -> None:
        try:
            self._id = self._together(self._begin)[0]
            written = self._together(lambda: self._stage(write))
            unflushed = self._together(lambda: self._publish(written, describe))[0]
            if unflushed:
                raise SaveError(self._incomplete(f"could not be flushed: {unflushed}"))
            try:
                self._together(lambda: self._place(written))
            except ShardedStateError as error:
                raise SaveError(
                    self._incomplete(f"not every file got its name: {error}")
                ) from error
            if self._first:
                staging.end(self._directory, self._id)
        except OSError as error:
            raise SaveError(self._incomplete(f"its journal stayed: {error}")) from error
        finally:
            if self._id and not self._in_doubt:
                self._discard()
            self._lock.release(remove=self._first and self._agreed)

    def _begin(self) -> str:
        self._directory.mkdir(parents=True, exist_ok=True)
        if not self._first:
            return ""
        self._lock.take()
        if self._lock.is_held:
            staging.recover(self._directory)
        self._lock.share()
        return staging.new_id()

    def _stage(self, write: Callable[[str], Written]) -> Written:
        if not self._first:
            self._lock.share()
        written = write(self._id)
        staging.flush_directory(self._directory)
        # Rank 0 publishes once it hears of success everywhere, even if it then never answers.
        self._in_doubt = not self._first
        return written

    def _publish(
        self, written: list[Written], describe: Callable[[list[Any], str], bytes]
    ) -> str | None:
        if not self._first:
            return None
        data = describe([rank.entry for rank in written], self._id)
        files = set().union(*(rank.files for rank in written))
        replaced = set().union(*(rank.replaced for rank in written))
        self._vanished = staging.listed_files(self._directory) - files - replaced
        staging.write_journal(self._directory, self._id, files, replaced | self._vanished)
        early = staging.staged(self._directory, manifest.FILE_NAME, self._id)
        staging.write_whole(early, data)
        staging.flush_directory(self._directory)
        self._in_doubt = True
        try:
            os.rename(early, self._directory / manifest.FILE_NAME)
        except OSError:
            self._in_doubt = False
            raise
        try:
            staging.flush_directory(self._directory)
        except OSError as error:  # nothing old may go, as long as a crash could bring it back
            return str(error)
        return None

    def _place(self, written: list[Written]) -> None:
        own = written[self._ranks.rank]
        replaced = own.replaced
        if self._first:
            replaced = replaced | self._vanished
            staging.place_side_files(self._directory, self._id)
        staging.place(self._directory, self._id, own.files, replaced)
        staging.flush_directory(self._directory)

    def _together(self, work: Callable[[], T]) -> list[T]:
        """Do `work`, and hear of the other ranks'. Raises when it failed on any of them."""
        failure: BaseException | None = None
        result: T | None = None
        try:
            result = work()
        except OSError as error:
            failure = SaveError(f"{self._directory} can't be written: {error}{self._unchanged()}")
            failure.__cause__ = error
        except BaseException as error:  # noqa: BLE001 - told to the other ranks, then raised
            failure = error
        told = None if failure is None else f"{type(failure).__name__}: {failure}"
        self._agreed = False
        results = self._ranks.gather((result, told, self._first and self._in_doubt))
        self._agreed = True
        failed = [f"rank {rank}: {text}" for rank, (_, text, _) in enumerate(results) if text]
        if failed and not results[0][2]:
            self._in_doubt = False  # rank 0 has heard it too, and will not publish
        if failure is not None:
            raise failure
        if failed:
            raise SaveError(f"The save failed, because it failed on:\n{listed(failed)}")
        return [result for result, _, _ in results]

    def _unchanged(self) -> str:
        return "" if self._in_doubt else "\nWhat it held before is as it was."

    def _incomplete(self, problem: str) -> str:
        return (
            f"{self._directory} holds the new checkpoint, but {problem}\n"
            f"It loads. The next save there completes it, or: {_COMPLETE} {self._directory}"
        )

    def _discard(self) -> None:
        try:
            staging.discard(self._directory, self._id)
        except OSError as error:
            logger.warning(
                "Files of a failed save stay in %s (%s); the next save there removes them.",
                self._directory,
                error,
            )
