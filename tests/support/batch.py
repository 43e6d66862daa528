"""Run many model-level jobs in one process, so that importing vLLM is paid once.

    python -m tests.support.batch JOBS.json RESULTS.jsonl

A job is a dict; see `Job`. The way and the plugins are the process's environment
(`tests.support.model_level.environment`). A job that fails leaves its error and the rest go on.
"""

import vss_test_ways

vss_test_ways.keep_out()  # Before anything imports vLLM.

import contextlib  # noqa: E402
import dataclasses  # noqa: E402
import gc  # noqa: E402
import logging  # noqa: E402
import os  # noqa: E402
import resource  # noqa: E402
import signal  # noqa: E402
import time  # noqa: E402
import traceback  # noqa: E402
from collections.abc import Iterable, Iterator  # noqa: E402
from pathlib import Path  # noqa: E402
from typing import Any  # noqa: E402

from tests.support.model_level import loaded  # noqa: E402
from tests.support.process import run_module, run_whole, serve  # noqa: E402

_MODULE = "tests.support.batch"


@dataclasses.dataclass
class Job:
    """Load `model`; change it (`mutate`), look at it (`snapshot`), save it (`save`), look again.

    `quant` names a module that registers quantization methods before the load. `poison` fills every
    parameter with NaN between building and loading. `layout` is put in VSS_LAYOUT while saving.
    `file_limit` is the most bytes that a file may have while saving: what a full disk does.
    `limit_s` is the time after which the process is killed, whatever it is doing.
    """

    id: str
    model: str
    engine: dict[str, Any] = dataclasses.field(default_factory=dict)
    mutate: str | None = None
    snapshot: bool = True
    kernels: bool = True
    save: str | None = None
    pattern: str | None = None
    max_size: int | None = None
    layout: str | None = None
    file_limit: int | None = None
    snapshot_after: bool = False
    poison: bool = False
    register: str | None = None
    limit_s: float | None = None


class _Warnings(logging.Handler):
    def __init__(self) -> None:
        super().__init__(logging.WARNING)
        self.lines: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.lines.append(record.getMessage())


@contextlib.contextmanager
def _layout(layout: str | None) -> Iterator[None]:
    os.environ.pop("VSS_LAYOUT", None)
    if layout is not None:
        os.environ["VSS_LAYOUT"] = layout
    try:
        yield
    finally:
        os.environ.pop("VSS_LAYOUT", None)


@contextlib.contextmanager
def _file_limit(limit: int | None) -> Iterator[None]:
    """Writing past `limit` bytes of any file fails with EFBIG, an OSError as ENOSPC is."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    if limit is not None:
        resource.setrlimit(resource.RLIMIT_FSIZE, (limit, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)


@contextlib.contextmanager
def _poisoned(active: bool) -> Iterator[None]:
    """Every parameter that vLLM builds holds NaN (integers: their largest value) until loaded."""
    if not active:
        yield
        return
    import torch
    from vllm.model_executor.model_loader import base_loader

    original = base_loader.initialize_model

    def initialize_model(*args: Any, **kwargs: Any) -> Any:
        model = original(*args, **kwargs)
        for parameter in model.parameters():
            floating = parameter.is_floating_point()
            limit = float("nan") if floating else torch.iinfo(parameter.dtype).max
            if not parameter.is_meta:
                parameter.data.fill_(limit)
        return model

    base_loader.initialize_model = initialize_model
    try:
        yield
    finally:
        base_loader.initialize_model = original


def check_way(model: Any) -> None:
    """The way took effect: in `tensors` and `reference`, no linear weight was packed away."""
    if vss_test_ways.chosen() == "packed":
        return
    from vllm.model_executor.layers.linear import LinearBase, UnquantizedLinearMethod

    for name, module in model.named_modules():
        if isinstance(module, LinearBase) and isinstance(
            module.quant_method, UnquantizedLinearMethod
        ):
            assert module.weight.numel(), f"{name}.weight is empty: the way did not take effect"


def run(job: Job) -> dict[str, Any]:
    """Do one job: its snapshots, warnings and seconds; or `error` with stage, type and message.

    `peak_growth` is by how many bytes the process outgrew what it held when the job began.
    """
    result: dict[str, Any] = {"id": job.id, "error": None}
    Path("/proc/self/clear_refs").write_text("5")  # Resets the peak, VmHWM: see proc(5).
    before = _memory("VmRSS")
    signal.setitimer(
        signal.ITIMER_REAL, job.limit_s or 0
    )  # SIGALRM ends the process, native code too
    warnings = _Warnings()
    logging.getLogger("vllm").addHandler(warnings)
    stage, began = "load", time.perf_counter()
    started = began
    try:
        if job.register:
            __import__(job.register)
        with (
            _poisoned(job.poison),
            _layout(job.layout),
            loaded(job.model, job.engine) as model,
        ):
            result["load_s"] = round(time.perf_counter() - began, 2)
            check_way(model)
            if job.mutate:
                from tests.zoo.mutations import MUTATIONS

                MUTATIONS[job.mutate](model)
            stage = "snapshot"
            from tests.support.snapshot import snapshot

            if job.snapshot:
                result["snapshot"] = snapshot(model, job.kernels)
            if job.save:
                stage, began = "save", time.perf_counter()
                from vllm.model_executor.model_loader import ShardedStateLoader

                with contextlib.suppress(OSError):  # The save itself has to tell.
                    Path(job.save).mkdir(parents=True, exist_ok=True)
                with _file_limit(job.file_limit):
                    ShardedStateLoader.save_model(
                        model, job.save, pattern=job.pattern, max_size=job.max_size
                    )
                result["save_s"] = round(time.perf_counter() - began, 2)
            if job.snapshot_after:
                stage = "snapshot after"
                result["snapshot_after"] = snapshot(model, job.kernels)
            del model
    except Exception as error:  # noqa: BLE001 - every failure is a result here
        result["error"] = {
            "stage": stage,
            "type": type(error).__name__,
            "bases": [base.__name__ for base in type(error).__mro__],
            "message": str(error),
            "traceback": traceback.format_exc(),
        }
        del error
    finally:
        logging.getLogger("vllm").removeHandler(warnings)
        signal.setitimer(signal.ITIMER_REAL, 0)
        gc.collect()
    result["warnings"] = warnings.lines
    result["job_s"] = round(time.perf_counter() - started, 3)
    result["peak_growth"] = _memory("VmHWM") - before
    return result


def _memory(name: str) -> int:
    """A field of /proc/self/status, in bytes."""
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith(f"{name}:"):
            return int(line.split()[1]) * 1024
    raise KeyError(name)


def run_batch(
    jobs: Iterable[Job], way: str, plugins: str, timeout: float = 1200, **env: str
) -> dict[str, dict[str, Any]]:
    """Run `jobs` in one new process and return the results by id."""
    jobs = list(jobs)
    results, _ = run_whole(_MODULE, jobs, way, plugins, timeout, env)
    return {result["id"]: result for result in results}


def run_deadly_batch(
    warm: Job, jobs: Iterable[Job], way: str, plugins: str, timeout: float = 1200, **env: str
) -> dict[str, dict[str, Any]]:
    """Like `run_batch`, but a job in which the process dies has that as its error; the rest go on.

    Each process does `warm` first, which pays for all that has to be imported.
    """
    left, done = list(jobs), dict[str, dict[str, Any]]()
    while left:
        warmed, ending = run_module(_MODULE, [warm, *left], way, plugins, timeout, env)
        if not warmed or warmed[0]["error"] is not None:
            raise RuntimeError(f"a batch process failed before its first job: {warmed} {ending}")
        results = warmed[1:]
        done |= {result["id"]: result for result in results}
        left = left[len(results) :]
        if left:
            error = {"stage": "process", "type": "died", "bases": [], "message": ending}
            done[left[0].id] = {"id": left[0].id, "error": error | {"traceback": ending}}
            left = left[1:]
    return done


if __name__ == "__main__":
    serve(lambda **fields: run(Job(**fields)))
