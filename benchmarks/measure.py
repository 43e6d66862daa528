"""Rounds: every contender in turn, each in its own process, medians at the end."""

import json
import os
import statistics
import subprocess
import sys
from collections.abc import Iterable
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent


class Worker:
    """A process that runs `benchmarks.worker` for one contender."""

    def __init__(self, kind: str, name: str, log: Path, environment: dict[str, str]) -> None:
        self.name = name
        self._log = log / f"{kind}-{name}.log"
        with open(self._log, "w") as errors:
            self._process = subprocess.Popen(
                [sys.executable, "-m", "benchmarks.worker", kind, name],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=errors,
                text=True,
                cwd=ROOT,
                env=environment,
            )

    def do(self, **task: Any) -> dict[str, Any]:
        """Have the worker do `task`; returns its result. RuntimeError where it fails or dies."""
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        try:
            self._process.stdin.write(json.dumps(task) + "\n")
            self._process.stdin.flush()
            line = self._process.stdout.readline()
        except BrokenPipeError:
            line = ""
        if not line:
            raise RuntimeError(f"it died with {self._process.wait()}; see {self._log}")
        answer = json.loads(line)
        if "error" in answer:
            raise RuntimeError(f"{answer['error']} (see {self._log})")
        result: dict[str, Any] = answer["result"]
        return result

    def stop(self) -> None:
        """End the process."""
        assert self._process.stdin is not None
        self._process.stdin.close()
        self._process.wait()


def stock_environment() -> dict[str, str]:
    """Environment in which vLLM has no plugins, and says little."""
    return {
        **{name: value for name, value in os.environ.items() if not name.startswith("VLLM_")},
        "VLLM_PLUGINS": "",
        "VLLM_LOGGING_LEVEL": "WARNING",
        "VLLM_NO_USAGE_STATS": "1",
        "HF_HUB_OFFLINE": "1",
    }


def rounds(
    workers: Iterable[Worker],
    tasks: Iterable[dict[str, Any]],
    count: int,
    each: bool = False,
) -> list[dict[str, Any]]:
    """Do each task with each worker: once for its peak memory and correctness, `count` times timed.

    Where `each` is true, a task is a dict that holds one for every worker, by name. The first run
    warms a worker up and is not timed. In each round another worker begins.

    A task's own `rounds` stands for `count`.

    Returns a record for each worker and task: the task, `name`, and either `error` or `seconds` (the
    median), `all` (each round's), the other figures of the median round, and `peak` in bytes.
    """
    workers, records = list(workers), []
    for task in tasks if workers else ():
        own = {w.name: task[w.name] if each else task for w in workers}
        wanted = min(one.get("rounds", count) for one in own.values())
        found: dict[str, dict[str, Any]] = {name: {"name": name, **own[name]} for name in own}
        costs: dict[str, list[dict[str, float]]] = {worker.name: [] for worker in workers}
        for number in range(wanted + 1):
            turn = number % len(workers)
            for worker in workers[turn:] + workers[:turn]:
                record = found[worker.name]
                if "error" in record:
                    continue
                try:
                    if number == 0:
                        record |= worker.do(do="check", **own[worker.name])
                    else:
                        costs[worker.name].append(worker.do(do="time", **own[worker.name]))
                except RuntimeError as error:
                    record["error"] = str(error)
        for name, record in found.items():
            if "error" not in record:
                record |= median(costs[name])
            records.append(record)
            # So that a run that is cut short has told what it knew.
            told = record["error"] if "error" in record else f"{record['seconds']:.3f} s"
            print(f"{name}: {told}", file=sys.stderr, flush=True)
    return records


def median(costs: list[dict[str, float]]) -> dict[str, Any]:
    """The round with the median time (the lower one of two), and the times of all."""
    seconds = [cost["seconds"] for cost in costs]
    middle = statistics.median_low(seconds)
    return {**costs[seconds.index(middle)], "all": seconds}
