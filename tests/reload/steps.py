"""Reload models through vLLM's own function, many in one process, and look at them after each step.

    python -m tests.reload.steps JOBS.json RESULTS.json

As `tests.support.batch`: the way and the plugins are the process's environment. A job loads a model and
takes its steps one after the other; each gives an error or none, and what the model holds then.
"""

import vss_test_ways

vss_test_ways.keep_out()  # Before anything imports vLLM.

import contextlib  # noqa: E402
import dataclasses  # noqa: E402
import gc  # noqa: E402
import os  # noqa: E402
import re  # noqa: E402
import traceback  # noqa: E402
from collections.abc import Iterable, Iterator  # noqa: E402
from pathlib import Path  # noqa: E402
from typing import Any  # noqa: E402

from tests.reload.senders import SENDERS  # noqa: E402
from tests.reload.states import STATES  # noqa: E402
from tests.reload.updating import PHASES, update  # noqa: E402
from tests.support.batch import check_way  # noqa: E402
from tests.support.model_level import configured  # noqa: E402
from tests.support.places import moved, places  # noqa: E402
from tests.support.process import run_whole, serve  # noqa: E402


@dataclasses.dataclass
class Step:
    """Send the tensors of `directory` (a tensor iterator), or let `path` be read; after the edits.

    only, drop: regular expressions of names. dtype, fill, rename, shape: name (a regular expression for
    `fill`) to the new thing. add: another name, to a copy of an existing one. again: a name sent twice.
    raise_at: the iterator raises instead of giving tensor number so and so. kernel_format: tensors are
    the running model's own, by its names, times `times`. atomic: VSS_RELOAD_ATOMIC. available: bytes of
    host memory that are left, as the operating system would tell. options: arguments of ours in the call.
    lose: before it, every parameter but those named becomes NaN, as if `sleep(level=2)` had lost it.
    state: one of `tests.reload.states`. Without `directory` and `path` the model's own checkpoint is read
    again. spoil: what is done to a copy of `path`, which is read then. save: where the model is saved
    afterwards.

    calls: send it in an update, so many tensors a call (0: all of them in one, drawn by it), instead of
    `reload_weights`; `phases` are those that happen. reused: what was sent is overwritten after each
    call. sender: one of `tests.reload.senders`.
    """

    directory: str | None = None
    path: str | None = None
    only: str | None = None
    drop: str | None = None
    dtype: dict[str, str] = dataclasses.field(default_factory=dict)
    fill: dict[str, float] = dataclasses.field(default_factory=dict)
    rename: dict[str, str] = dataclasses.field(default_factory=dict)
    shape: dict[str, list[int]] = dataclasses.field(default_factory=dict)
    add: dict[str, str] = dataclasses.field(default_factory=dict)
    again: str | None = None
    raise_at: int | None = None
    atomic: str = "model"
    available: int | None = None
    kernel_format: bool = False
    times: float = 1.0
    mutate: str | None = None
    options: dict[str, Any] = dataclasses.field(default_factory=dict)
    lose: list[str] | None = None
    state: str | None = None
    spoil: str | None = None
    save: str | None = None
    calls: int | None = None
    phases: list[str] = dataclasses.field(default_factory=lambda: list(PHASES))
    reused: bool = False
    sender: str | None = None


@dataclasses.dataclass
class Job:
    """digest: take the digest of the loaded model. blind: find what may change unseen by it. save: where
    the model is saved, in `layout`, before any step.
    """

    id: str
    model: str
    steps: list[dict[str, Any]]
    engine: dict[str, Any] = dataclasses.field(default_factory=dict)
    mutate: str | None = None
    kernels: bool = True
    register: str | None = None
    digest: bool = False
    blind: bool = False
    save: str | None = None
    layout: str | None = None


def _tensors(step: Step, model: Any) -> dict[str, Any]:
    import torch
    from safetensors.torch import load_file

    found: dict[str, Any] = {}
    if step.kernel_format:
        found = {k: v.detach().clone() * step.times for k, v in model.state_dict().items()}
    else:
        for file in sorted(Path(step.directory).glob("*.safetensors")):
            found |= load_file(file)
    for name, source in step.add.items():
        found[name] = found[source].clone()
    if step.only:
        found = {k: v for k, v in found.items() if re.search(step.only, k)}
    if step.drop:
        found = {k: v for k, v in found.items() if not re.search(step.drop, k)}
    for name, shape in step.shape.items():
        found[name] = torch.ones(shape, dtype=found[name].dtype)
    for name, dtype in step.dtype.items():
        found[name] = found[name].to(getattr(torch, dtype))
    for pattern, value in step.fill.items():
        for name in found:
            if re.search(pattern, name):
                found[name] = torch.full_like(found[name], value)
    return {step.rename.get(name, name): tensor for name, tensor in found.items()}


def _iterator(step: Step, model: Any) -> Iterator[tuple[str, Any]]:
    tensors = _tensors(step, model)
    if step.sender:
        yield from SENDERS[step.sender](tensors, model)
        return
    for number, item in enumerate(tensors.items()):
        if number == step.raise_at:
            raise OSError("the trainer went away")
        yield item
        if item[0] == step.again:
            yield item
    if step.raise_at == len(tensors):
        raise OSError("the trainer went away")


def _take(step: Step, model: Any, config: Any) -> dict[str, Any] | list[str] | None:
    """Do the step: what our `reload_weights` reports, or the names that `load_weights` returns."""
    from vllm.config import set_current_vllm_config
    from vllm.model_executor.model_loader.reload import inplace

    from vllm_sharded_state.reload import call

    if step.mutate:
        from tests.zoo.mutations import MUTATIONS

        MUTATIONS[step.mutate](model)
    if step.lose is not None:
        _lose(model, step.lose)
    weights = None if step.path or step.directory is None else _iterator(step, model)
    if step.kernel_format:
        weights = _iterator(step, model)
    state = STATES[step.state](config) if step.state else contextlib.nullcontext()
    worker = set_current_vllm_config(config)  # As Worker.reload_weights does.
    with call.made(**step.options) as made, worker, _host(step), state:
        if step.calls is None:
            inplace.reload_weights(config, model, weights, _path(step), not step.kernel_format)
            report: dict[str, Any] | list[str] | None = made.report
        else:
            report = sorted(update(model, weights, step.calls, step.phases, step.reused))
    if step.save:
        _save(model, step.save, None)
    return report


def _lose(model: Any, saved: list[str]) -> None:
    """What a CUDA worker and `reload.lost` do for `sleep(level=2)` and `wake_up`."""
    from vllm_sharded_state.reload import lost

    for name, parameter in model.named_parameters():
        if name not in saved:
            parameter.data.fill_(float("nan"))
    lost.lose(model, saved)


def _path(step: Step) -> str | None:
    if step.path is None or step.spoil is None:
        return step.path
    from tests.reload.spoils import SPOILS
    from tests.support import edit

    copy = Path(f"{step.path}.{step.spoil}")
    if not copy.exists():
        SPOILS[step.spoil](edit.copy(Path(step.path), copy))
    return str(copy)


def _save(model: Any, path: str, layout: str | None) -> None:
    from vllm.model_executor.model_loader import ShardedStateLoader

    Path(path).mkdir(parents=True)
    os.environ["VSS_LAYOUT"] = layout or "auto"
    try:
        ShardedStateLoader.save_model(model, path)
    finally:
        del os.environ["VSS_LAYOUT"]


@contextlib.contextmanager
def _host(step: Step) -> Iterator[None]:
    """The environment of a step; and a stand-in for a host whose memory is nearly full."""
    import psutil

    os.environ["VSS_RELOAD_ATOMIC"] = step.atomic
    original = psutil.virtual_memory
    if step.available is not None:
        left = original()._replace(available=step.available)
        psutil.virtual_memory = lambda: left
    try:
        yield
    finally:
        psutil.virtual_memory = original
        del os.environ["VSS_RELOAD_ATOMIC"]


def run(job: Job) -> dict[str, Any]:
    """`before`: the snapshot of the loaded model; `steps`: error, snapshot, and places that moved."""
    from tests.support.snapshot import snapshot

    result: dict[str, Any] = {"id": job.id, "error": None, "steps": []}
    try:
        if job.register:
            __import__(job.register)
        with configured(Path(job.model), job.engine) as (model, config):
            check_way(model)
            if job.mutate:
                from tests.zoo.mutations import MUTATIONS

                MUTATIONS[job.mutate](model)
            result["before"] = snapshot(model, job.kernels)
            if job.digest:
                from vllm_sharded_state.state.digest import state_digest

                result["digest"] = state_digest(model, config)
            if job.blind:
                from tests.reload.blind import blind_spots

                result["blind"] = blind_spots(model, config)
            if job.save:
                _save(model, job.save, job.layout)
            for given in job.steps:
                step, before = Step(**given), places(model)
                name = config.model_config.model
                error = report = None
                try:
                    report = _take(step, model, config)
                except Exception as caught:  # noqa: BLE001 - every failure is a result here
                    error = {
                        "type": type(caught).__name__,
                        "message": str(caught),
                        "traceback": traceback.format_exc(),
                    }
                    del caught
                after = places(model)
                meta = sorted(k for k, v in after.items() if v == "meta")
                result["steps"].append(
                    {
                        "error": error,
                        "report": report,
                        "moved": moved(before, after),
                        "loaded": [] if step.calls is None else report,
                        "meta": meta,
                        "renamed": config.model_config.model != name,
                        "snapshot": None if meta else snapshot(model, job.kernels),
                    }
                )
            del model, config
    except Exception as error:  # noqa: BLE001 - every failure is a result here
        result["error"] = f"{type(error).__name__}: {error}\n{traceback.format_exc()}"
        del error
    gc.collect()
    return result


def run_steps(
    jobs: Iterable[Job], way: str, plugins: str, timeout: float = 600, **env: str
) -> dict[str, dict[str, Any]]:
    """Run `jobs` in one new process and return the results by id."""
    results, _ = run_whole("tests.reload.steps", list(jobs), way, plugins, timeout, env)
    return {result["id"]: result for result in results}


if __name__ == "__main__":
    serve(lambda **fields: run(Job(**fields)))
