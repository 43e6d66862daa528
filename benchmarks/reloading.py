"""What benchmarks of reloads share: contenders in processes of their own, and their results."""

import json
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]


def timed(work: Callable[[int], object], rounds: int, warm_up: int) -> dict[str, list[float]]:
    """`seconds` of `rounds` calls of `work` with their number, and of the `processor` of all cores.

    `warm_up` calls before them are not counted.
    """
    seconds, processor = [], []
    for number in range(warm_up + rounds):
        began, worked = time.perf_counter(), time.process_time()
        work(number)
        processor.append(time.process_time() - worked)
        seconds.append(time.perf_counter() - began)
    return {"seconds": seconds[warm_up:], "processor": processor[warm_up:]}


def tell(result: object) -> None:
    """Print a result for `run`."""
    print("RESULT", json.dumps(result))


def run(script: str, way: str, plugins: str, *arguments: str, **variables: str) -> Any:
    """What `script` tells in a process of its own, with `variables` in its environment."""
    from tests.support.model_level import environment

    done = subprocess.run(
        [sys.executable, script, *arguments],
        env=environment(way, plugins)
        | {"PYTHONPATH": os.environ.get("PYTHONPATH", str(ROOT))}
        | variables,
        stdout=subprocess.PIPE,
        text=True,
        check=True,
    )
    (line,) = (x for x in done.stdout.splitlines() if x.startswith("RESULT "))
    return json.loads(line.removeprefix("RESULT "))


def line(name: str, result: Any) -> str:
    """Median, range and size of a contender's reloads."""
    seconds = result["seconds"]
    return (
        f"{name:10} {statistics.median(seconds):.3f} s (of {len(seconds)}: {min(seconds):.3f} to "
        f"{max(seconds):.3f}; {statistics.median(result['processor']):.3f} s of all cores), "
        f"{result['bytes'] / 2**20:.0f} MiB"
    )
