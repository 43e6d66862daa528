"""One contender in a process of its own: takes tasks, one JSON line each, and answers in kind.

    python -m benchmarks.worker KIND NAME

KIND is `read`, `write` or `model`. The parent decides whose turn it is, so that the rounds of all
contenders alternate, while each has its own heap, threads and peak memory.
"""

import json
import os
import shutil
import sys
import tempfile
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

from benchmarks import page_cache, process
from benchmarks.contenders import READERS, WRITERS

Task = dict[str, Any]


def _reading(name: str) -> Callable[[Task], Any]:
    from benchmarks import inputs
    from benchmarks.destination import destination
    from vllm_sharded_state.checkpoint.digest import tensor_checksum

    contender = READERS[name].make()
    known: dict[str, inputs.Input] = {}

    def do(task: Task) -> Any:
        given = known.setdefault(task["input"], inputs.read(Path(task["input"])))
        make = page_cache.make_cold if task["cold"] else page_cache.make_warm
        with destination(given, task["state"]) as into:
            make(given.paths)
            if task["do"] == "time":
                return process.cost(lambda: contender.read(given, into))
            most = process.peak(lambda: contender.read(given, into))
            wrong = [
                key
                for key, tensor in into.items()
                if tensor_checksum(tensor) != given.tensors[key].checksum
            ]
            if wrong:
                raise RuntimeError(f"{len(wrong)} tensors were not filled, {wrong[0]} among them")
            return {"peak": most}

    return do


def _writing(name: str) -> Callable[[Task], Any]:
    from benchmarks import inputs
    from benchmarks.contenders.limit import Preadv
    from benchmarks.destination import destination

    contender = WRITERS[name].make()

    def do(task: Task) -> Any:
        given = inputs.read(Path(task["input"]))
        with destination(given, "touched") as tensors:
            Preadv().read(given, tensors)
            directory = Path(tempfile.mkdtemp(dir=task["scratch"]))
            try:
                # What others have left to flush would be flushed in this one's time.
                os.sync()
                work = lambda: contender.write(directory, tensors, task["sync"])  # noqa: E731
                if task["do"] == "time":
                    return process.cost(work)
                most = process.peak(work)
                size = sum(path.stat().st_size for path in directory.iterdir())
                if size < given.bytes:
                    raise RuntimeError(f"{size} bytes were written, of {given.bytes}")
                return {"peak": most}
            finally:
                shutil.rmtree(directory)

    return do


def _model(name: str) -> Callable[[Task], Any]:
    from benchmarks import model_level

    return model_level.job(name)


KINDS = {"read": _reading, "write": _writing, "model": _model}


def main() -> None:
    # Answers have a descriptor of their own: libraries print.
    answers = os.fdopen(os.dup(1), "w", buffering=1)
    os.dup2(2, 1)
    kind, name = sys.argv[1:]
    do = None
    for line in sys.stdin:
        try:
            if do is None:
                do = KINDS[kind](name)
            answer = {"result": do(json.loads(line))}
        except Exception as error:  # noqa: BLE001 - the parent reports it beside the others' figures
            traceback.print_exc()
            answer = {"error": f"{type(error).__name__}: {error}"}
        answers.write(json.dumps(answer) + "\n")


if __name__ == "__main__":
    main()
