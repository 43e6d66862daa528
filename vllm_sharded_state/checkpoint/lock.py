"""One saver at a time in a directory: a lock that the kernel gives back when its holder is killed.

`flock` on a small file, which is there only while a save runs. Rank 0 takes it alone, then shares it with
the other ranks of its save, so it is free only when the last of them has ended. Its name begins with a
dot and ends in nothing that vLLM or a hub takes for a part of a model.
"""

import errno
import fcntl
import json
import logging
import os
import socket
import time
from pathlib import Path

from vllm_sharded_state.errors import SaveError

logger = logging.getLogger("vllm.sharded_state.checkpoint.lock")

FILE_NAME = ".sharded_state.lock"

#: What file systems without `flock` answer (NFS without a lock daemon, Lustre mounted without `flock`).
_UNSUPPORTED = frozenset({errno.ENOLCK, errno.ENOSYS, errno.ENOTSUP, errno.EOPNOTSUPP})

#: Errors with which `flock` says that another process has the lock.
_HELD = frozenset({errno.EWOULDBLOCK, errno.EAGAIN, errno.EACCES})


class SaveLock:
    """The lock of one process on one directory.

    `is_held` is false before it was taken, and where the file system has no locks: then two saves can
    run at once, and the later one to finish wins. `OSError` passes through.
    """

    def __init__(self, directory: Path) -> None:
        self._directory = directory
        self._path = directory / FILE_NAME
        self._fd: int | None = None
        self.is_held = False

    def take(self) -> None:
        """Take the lock for a new save. Raises `SaveError`, naming the holder, when there is one."""
        self._lock(fcntl.LOCK_EX)
        if self.is_held:
            assert self._fd is not None
            holder = {"pid": os.getpid(), "host": socket.gethostname(), "since": _now()}
            os.ftruncate(self._fd, 0)
            os.pwrite(self._fd, json.dumps(holder).encode(), 0)

    def share(self) -> None:
        """Hold the lock together with the other ranks of this save. Raises `SaveError`."""
        self._lock(fcntl.LOCK_SH)

    def release(self, remove: bool) -> None:
        """Give the lock back; `remove` its file too, when no other rank needs it any more."""
        if self._fd is None:
            return
        try:
            if remove and self.is_held and self._is_current():
                os.unlink(self._path)
        except OSError as error:
            logger.warning("%s could not be removed (%s); the next save does it", self._path, error)
        fd, self._fd, self.is_held = self._fd, None, False
        try:
            os.close(fd)  # gives the lock back whatever it answers
        except OSError as error:
            logger.warning("%s could not be closed: %s", self._path, error)

    def _lock(self, kind: int) -> None:
        while True:
            if self._fd is None:
                self._fd = os.open(self._path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o666)
            try:
                fcntl.flock(self._fd, kind | fcntl.LOCK_NB)
            except OSError as error:
                if error.errno in _HELD:
                    holder = self._holder()
                    self.release(remove=False)
                    raise SaveError(
                        f"Another save into {self._directory} is running ({holder}).\n"
                        "Nothing was changed. Wait for it to end, or save into another directory."
                    ) from error
                if error.errno not in _UNSUPPORTED:
                    raise
                self.is_held = False
                logger.warning(
                    "%s lies on a file system without locks (%s): two saves into it at once are not "
                    "kept apart. The later one wins; a load refuses a mixture of both.",
                    self._directory,
                    os.strerror(error.errno),
                )
                return
            if self._is_current():
                self.is_held = True
                return
            os.close(self._fd)  # its last holder removed the file after it was opened here
            self._fd = None

    def _is_current(self) -> bool:
        """Whether the open file is still the one that others would lock."""
        assert self._fd is not None
        try:
            return os.path.samestat(os.fstat(self._fd), os.stat(self._path))
        except FileNotFoundError:
            return False

    def _holder(self) -> str:
        assert self._fd is not None
        try:
            told = json.loads(os.pread(self._fd, 4096, 0))
            return f"process {told['pid']} on {told['host']} since {told['since']}"
        except (ValueError, KeyError, TypeError):
            return "it has not said yet which process it is"


def _now() -> str:
    return time.strftime("%Y-%m-%d %H:%M:%S %z")
