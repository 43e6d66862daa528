"""Work in a new process: pieces go in as JSON, and a line of JSON comes back for each that was done."""

import atexit
import dataclasses
import gc
import json
import subprocess
import sys
import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from tests.support.model_level import environment

ROOT = Path(__file__).resolve().parents[2]

Result = dict[str, Any]


def run_module(
    module: str, pieces: Sequence[Any], way: str, plugins: str, timeout: float, env: dict[str, str]
) -> tuple[list[Result], str]:
    """The results of `pieces` (dataclasses), as far as the process came, and how it ended.

    `module` is run as a program that calls `serve`; the way and the plugins are its environment.
    """
    with tempfile.TemporaryDirectory() as scratch:
        given, made = Path(scratch, "given.json"), Path(scratch, "made.jsonl")
        given.write_text(json.dumps([dataclasses.asdict(piece) for piece in pieces]))
        process = subprocess.run(
            [sys.executable, "-m", module, str(given), str(made)],
            cwd=ROOT,
            env=environment(way, plugins) | env,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            timeout=timeout,
            check=False,
        )
        whole = made.read_text().split("\n")[:-1] if made.exists() else []
    return [json.loads(line) for line in whole], f"exit {process.returncode}\n{process.stdout}"


def run_whole(
    module: str, pieces: Sequence[Any], way: str, plugins: str, timeout: float, env: dict[str, str]
) -> tuple[list[Result], str]:
    """As `run_module`, but raises when the process died before all was done."""
    results, ending = run_module(module, pieces, way, plugins, timeout, env)
    if len(results) < len(pieces):
        raise RuntimeError(f"a process of {module} died: {ending}")
    return results, ending


def serve(work: Callable[..., Result]) -> None:
    """Do each piece that `run_module` gave: `work` gets its fields, and gives its result."""
    given, made = sys.argv[1:]
    with open(made, "w") as file:
        for number, piece in enumerate(json.loads(Path(given).read_text())):
            print(json.dumps(work(**piece)), file=file, flush=True)
            if number == 0:
                # Garbage is collected after each piece: spare that the objects of all imported modules.
                gc.freeze()
                atexit.register(gc.unfreeze)
