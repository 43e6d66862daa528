"""Whole loads and saves with vLLM's `get_model` and `ShardedStateLoader.save_model`, without an engine.

What is timed of a load is `get_model` without what is upstream's and the same for all, which is given
beside it: building the model (`build`), processing its weights (`process`), and the two collections
of garbage that upstream asks for (`collect`).
"""

import cProfile
import functools
import gc
import os
import pstats
import shutil
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from benchmarks import page_cache, process

Task = dict[str, Any]

#: Engine arguments by contender.
ENGINES: dict[str, dict[str, Any]] = {
    "default": {},
    "stock": {"load_format": "sharded_state"},
    "ours-full": {"load_format": "sharded_state"},
    "ours-size": {
        "load_format": "sharded_state",
        "model_loader_extra_config": {"verify": "size"},
    },
    "ours-off": {"load_format": "sharded_state", "model_loader_extra_config": {"verify": "off"}},
}


#: The longest functions that a profile names.
PROFILED = 12


def profile(work: Callable[[], Any]) -> dict[str, Any]:
    """The functions in which `work` spends most time itself: `[seconds, calls, where]` each."""
    profiler = cProfile.Profile()
    profiler.runcall(work)
    stats = pstats.Stats(profiler)
    found = [
        (own, calls, f"{'/'.join(Path(file).parts[-2:])}:{line} {name}")
        for (file, line, name), (_, calls, own, _, _) in stats.stats.items()  # type: ignore[attr-defined]
    ]
    return {"profile": sorted(found, reverse=True)[:PROFILED]}


#: What to find out of a piece of work, by a task's `do`.
MEASURES: dict[str, Callable[[Callable[[], Any]], dict[str, Any]]] = {
    "check": lambda work: {"peak": process.peak(work)},
    "time": process.cost,
    "profile": profile,
}


@contextmanager
def _model(task: Task, engine: dict[str, Any]) -> Iterator[Any]:
    """The model of `task`, loaded with `engine` beside the task's own engine arguments."""
    from benchmarks import many_tensors
    from tests.support.model_level import loaded

    many_tensors.register()
    with loaded(Path(task["model"]), {**task.get("engine", {}), **engine}) as model:
        yield model


def save(task: Task) -> dict[str, Any]:
    """Load `task["model"]`, save it to `task["out"]`."""
    from vllm.model_executor.model_loader import ShardedStateLoader

    out = Path(task["out"])
    shutil.rmtree(out, ignore_errors=True)
    out.mkdir(parents=True)
    with _model(task, {}) as model:
        ShardedStateLoader.save_model(model, str(out))
    if not (out / "config.json").exists():  # stock saves tensors only
        for path in Path(task["model"]).iterdir():
            if path.suffix != ".safetensors" and "safetensors" not in path.name:
                shutil.copy(path, out)
    return {}


class _Saver:
    """Saves the same live model again and again."""

    def __init__(self) -> None:
        self._stack = ExitStack()
        self._live: tuple[str, Any] | None = None

    def __call__(self, task: Task) -> dict[str, Any]:
        from vllm.model_executor.model_loader import ShardedStateLoader

        if self._live is None or self._live[0] != task["model"]:
            self._stack.close()
            self._live = (task["model"], self._stack.enter_context(_model(task, {})))
        model = self._live[1]
        directory = tempfile.mkdtemp(dir=task["scratch"])
        try:
            return MEASURES[task["do"]](
                functools.partial(ShardedStateLoader.save_model, model, directory)
            )
        finally:
            shutil.rmtree(directory)


class _Loader:
    """Loads a model and drops it."""

    def __init__(self, name: str) -> None:
        self._engine = ENGINES[name]

    def __call__(self, task: Task) -> dict[str, Any]:
        from vllm.model_executor import model_loader
        from vllm.model_executor.model_loader import base_loader

        paths = sorted(Path(task["model"]).glob("*.safetensors"))
        make = page_cache.make_cold if task["cold"] else page_cache.make_warm
        spent: dict[str, float] = {}
        costs: list[dict[str, Any]] = []
        upstream = {
            "build": (base_loader, "initialize_model"),
            "process": (base_loader, "process_weights_after_loading"),
        }

        def get_model(*args: Any, **kwargs: Any) -> Any:
            make(paths)
            models: list[Any] = []
            costs.append(MEASURES[task["do"]](lambda: models.append(original(*args, **kwargs))))
            return models[0]

        original = model_loader.get_model
        with ExitStack() as stack:
            for name, (module, symbol) in upstream.items():
                stack.enter_context(_replaced(module, symbol, _timed(name, spent)))
            collect = SimpleNamespace(collect=_timed("collect", spent)(gc.collect))
            stack.enter_context(_replaced(base_loader, "gc", lambda _: collect))
            stack.enter_context(_replaced(model_loader, "get_model", lambda _: get_model))
            with _model(task, self._engine):
                pass
        found = {**costs[0], **spent}
        if task["do"] == "time":
            found["total"] = found["seconds"]
            found["seconds"] -= sum(spent.values())
        return found


def _timed(name: str, spent: dict[str, float]) -> Callable[[Any], Any]:
    """Make a function count the seconds that it takes in `spent[name]`."""

    def wrap(function: Any) -> Any:
        @functools.wraps(function)
        def timed(*args: Any, **kwargs: Any) -> Any:
            began = time.perf_counter()
            try:
                return function(*args, **kwargs)
            finally:
                spent[name] = spent.get(name, 0.0) + time.perf_counter() - began

        return timed

    return wrap


@contextmanager
def _replaced(module: Any, symbol: str, wrap: Callable[[Any], Any]) -> Iterator[None]:
    original = getattr(module, symbol)
    setattr(module, symbol, wrap(original))
    try:
        yield
    finally:
        setattr(module, symbol, original)


def job(name: str) -> Callable[[Task], Any]:
    """What a worker of kind `model` does: tasks are of the kinds `load`, `save` and `make`."""
    loader, saver = _Loader(name), _Saver()

    def do(task: Task) -> Any:
        return {"load": loader, "save": saver, "make": save}[task["what"]](task)

    return do


def environment(way: str, name: str) -> dict[str, str]:
    """The environment of a worker for contender `name` in which vLLM runs in `way`."""
    from tests.support.model_level import environment as of

    plugins = "vss_test_ways,sharded_state" if name.startswith("ours") else "vss_test_ways"
    cores = str(len(os.sched_getaffinity(0)))
    return {**of(way, plugins), "OMP_NUM_THREADS": cores}
