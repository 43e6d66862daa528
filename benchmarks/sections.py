"""What is measured: each section makes its inputs, lets the contenders run, and returns records."""

import shutil
import subprocess
import sys
from collections.abc import Iterable
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from . import inputs, many_tensors, model_level
from .contenders import READERS, WRITERS, Contender
from .destination import STATES
from .measure import ROOT, Worker, rounds, stock_environment

Record = dict[str, Any]

#: Rounds from a cold page cache: seconds each, and the disk's own speed decides.
COLD_ROUNDS = 3


@dataclass(frozen=True)
class Setting:
    """Where things lie, and how much is measured."""

    cache: Path
    rounds: int = 5
    large: str = "llama"
    counts: tuple[int, ...] = (10_000, 50_000)
    only: frozenset[str] = frozenset()

    @property
    def scratch(self) -> Path:
        """A directory for what is written and removed again, in the file system of the inputs."""
        path = self.cache / "scratch"
        path.mkdir(parents=True, exist_ok=True)
        return path

    def wants(self, name: str) -> bool:
        """Whether the contender `name` takes part."""
        return not self.only or name in self.only


def _contend(
    setting: Setting, kind: str, contenders: dict[str, Contender], tasks: Iterable[Record]
) -> list[Record]:
    """Records of all contenders of one kind; those that can't run here say why."""
    records: list[Record] = []
    tasks = list(tasks)
    with ExitStack() as stack:
        workers = []
        for name, contender in contenders.items():
            missing = contender.missing()
            if not setting.wants(name):
                continue
            if missing:
                records += [{"name": name, "error": missing, **task} for task in tasks]
                continue
            environment = stock_environment() | dict(contender.environment)
            worker = Worker(kind, name, setting.cache, environment)
            stack.callback(worker.stop)
            workers.append(worker)
        records = rounds(workers, tasks, setting.rounds) + records
    return [{"section": kind, "says": contenders[r["name"]].says, **r} for r in records]


def read(setting: Setting) -> list[Record]:
    """The large model from a warm page cache, into memory of both states."""
    given = inputs.ensure(setting.large, setting.cache)
    tasks = [
        {"input": str(given.directory), "bytes": given.bytes, "state": state, "cold": False}
        for state in STATES
    ]
    return _contend(setting, "read", READERS, tasks)


def cold(setting: Setting) -> list[Record]:
    """The large model from the disk, into fresh memory."""
    given = inputs.ensure(setting.large, setting.cache)
    task = {"input": str(given.directory), "bytes": given.bytes, "state": "fresh", "cold": True}
    few = min(COLD_ROUNDS, setting.rounds)
    return _contend(setting, "read", READERS, [{**task, "rounds": few}])


def write(setting: Setting) -> list[Record]:
    """The large model, with fsync and without."""
    given = inputs.ensure(setting.large, setting.cache)
    tasks = [_to_write(setting, given, sync) for sync in (False, True)]
    return _contend(setting, "write", WRITERS, tasks)


def _to_write(setting: Setting, given: inputs.Input, sync: bool) -> Record:
    return {
        "input": str(given.directory),
        "bytes": given.bytes,
        "scratch": str(setting.scratch),
        "sync": sync,
    }


def tensors(setting: Setting) -> list[Record]:
    """Very many small tensors: reading and writing parts alone, no page to clear, no fsync."""
    given = [inputs.ensure(f"tiny-{count}", setting.cache) for count in setting.counts]
    to_read = [
        {
            "input": str(one.directory),
            "bytes": one.bytes,
            "tensors": len(one.tensors),
            "state": "touched",
            "cold": False,
        }
        for one in given
    ]
    to_write = [{**_to_write(setting, one, False), "tensors": len(one.tensors)} for one in given]
    records = _contend(setting, "read", READERS, to_read)
    records += _contend(setting, "write", WRITERS, to_write)
    return [{**record, "section": f"tensors, {record['section']}"} for record in records]


def many(setting: Setting) -> list[Record]:
    """Very many small tensors in a vLLM model: whole saves and loads, and a profile of ours."""
    records: list[Record] = []
    names = [name for name in ("ours-full", "ours-off", "stock") if setting.wants(name)]
    savers = [name for name in names if name != "ours-off"]
    with _Models(setting, "tensors", names) as models:
        for count in setting.counts:
            model = many_tensors.write_config(setting.cache / f"many-{count}", count)
            dummy = {"load_format": "dummy"}
            common = {"bytes": count * 256, "tensors": count}
            saved = models.save(model, savers, dummy)
            to_save = {"what": "save", "model": str(model), "engine": dummy, **common}
            to_save["scratch"] = str(setting.scratch)
            records += models.rounds(dict.fromkeys(savers, to_save))
            to_load = {
                name: {
                    "what": "load",
                    "model": str(saved["stock" if name == "stock" else "ours-full"]),
                    "cold": False,
                    **common,
                }
                for name in names
            }
            records += models.rounds(to_load)
            if "ours-full" in names and count == max(setting.counts):
                for task in (to_save, to_load["ours-full"]):
                    profile = models.workers["ours-full"].do(do="profile", **task)
                    records.append({"name": "ours-full", **task, **profile})
    return [{**record, "section": "many"} for record in records]


def gemma(setting: Setting) -> list[Record]:
    """Gemma 3 270M: whole loads, warm and cold, with and without oneDNN's packing of weights."""
    # A copy of its own: what another process has mapped can't be made cold.
    source = setting.cache / "gemma"
    if not source.exists():
        shutil.copytree(_real_model("gemma"), source)
    size = sum(path.stat().st_size for path in source.glob("*.safetensors"))
    records = []
    for way in ("tensors", "packed"):
        names = [name for name in model_level.ENGINES if setting.wants(name)]
        if way == "packed" and "stock" in names:  # it can't load there what it saved
            names.remove("stock")
        with _Models(setting, way, names) as models:
            saved = models.save(source, [n for n in names if n in ("ours-full", "stock")], {})
            for is_cold in (False, True):
                tasks = {
                    name: {
                        "what": "load",
                        "model": str(saved.get(name, saved["ours-full"]))
                        if name != "default"
                        else str(source),
                        "cold": is_cold,
                        "bytes": size,
                        "way": way,
                        "rounds": min(COLD_ROUNDS, setting.rounds) if is_cold else setting.rounds,
                    }
                    for name in names
                }
                records += models.rounds(tasks)
    return [{**record, "section": "gemma"} for record in records]


class _Models:
    """Workers of kind `model`, one for each contender, while the block lasts."""

    def __init__(self, setting: Setting, way: str, names: list[str]) -> None:
        self._setting, self._way = setting, way
        self._stack = ExitStack()
        self.workers = {
            name: Worker("model", name, setting.cache, model_level.environment(way, name))
            for name in names
        }
        for worker in self.workers.values():
            self._stack.callback(worker.stop)

    def __enter__(self) -> "_Models":
        return self

    def __exit__(self, *_: object) -> None:
        self._stack.close()

    def save(self, model: Path, names: list[str], engine: dict[str, Any]) -> dict[str, Path]:
        """What each of `names` saves of `model`, by name."""
        saved = {}
        for name in names:
            out = self._setting.cache / f"saved-{model.name}-{self._way}-{name}"
            self.workers[name].do(
                do="make", what="make", model=str(model), engine=engine, out=str(out)
            )
            saved[name] = out
        return saved

    def rounds(self, tasks: dict[str, Record]) -> list[Record]:
        """Rounds in which every contender does its own task."""
        workers = [self.workers[name] for name in tasks]
        return rounds(workers, [tasks], self._setting.rounds, each=True)


def _real_model(name: str) -> Path:
    """The directory of a real model, built where it is missing (tools/models.py)."""
    done = subprocess.run(
        [sys.executable, str(ROOT / "tools" / "models.py"), name],
        stdout=subprocess.PIPE,
        text=True,
        check=True,
    )
    return Path(done.stdout.strip())


SECTIONS = {
    "read": read,
    "cold": cold,
    "write": write,
    "tensors": tensors,
    "many": many,
    "gemma": gemma,
}
