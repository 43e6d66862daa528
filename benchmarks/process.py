"""What one piece of work cost this process: seconds, processor time, bytes read, memory."""

import gc
import resource
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any


def anonymous() -> int:
    """This process's anonymous resident memory in bytes."""
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith("RssAnon:"):
            return int(line.split()[1]) * 1024
    raise RuntimeError("this kernel does not report RssAnon")


def bytes_moved() -> dict[str, int]:
    """`/proc/self/io`: `rchar` and `wchar` through system calls, `read_bytes` from the disk."""
    lines = Path("/proc/self/io").read_text().splitlines()
    values = {name: int(value) for name, value in (line.split(": ") for line in lines)}
    return {name: values[name] for name in ("rchar", "wchar", "read_bytes")}


def cost(work: Callable[[], Any]) -> dict[str, float]:
    """Run `work` once: `seconds`, `user` and `system` seconds of all threads, and bytes moved.

    Bytes that are read through a memory map are in `read_bytes` when they come from the disk, and
    nowhere when they are in the page cache.
    """
    gc.collect()  # else what was made before is collected in this one's time, or is not, by chance
    moved, used = bytes_moved(), resource.getrusage(resource.RUSAGE_SELF)
    began = time.perf_counter()
    work()
    seconds = time.perf_counter() - began
    after = resource.getrusage(resource.RUSAGE_SELF)
    return {
        "seconds": seconds,
        "user": after.ru_utime - used.ru_utime,
        "system": after.ru_stime - used.ru_stime,
        **{name: value - moved[name] for name, value in bytes_moved().items()},
    }


def peak(work: Callable[[], Any]) -> int:
    """Run `work`; returns the most anonymous memory it took beyond what was there, in bytes.

    Looked at every 2 ms. Pages of memory-mapped files do not count: the kernel can drop them.
    """
    before = most = anonymous()
    done = threading.Event()

    def watch() -> None:
        nonlocal most
        while not done.wait(0.002):
            most = max(most, anonymous())

    thread = threading.Thread(target=watch)
    thread.start()
    try:
        work()
    finally:
        done.set()
        thread.join()
    return max(most, anonymous()) - before
