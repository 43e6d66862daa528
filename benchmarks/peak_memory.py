"""How much anonymous memory a save and a load take beyond the model.

    python -m benchmarks.peak_memory MODEL [--kv-cache-dtype fp8] [--layout auto]

Starts a real engine twice, each time in a process of its own: once from MODEL, to save it, and once
from what was saved. A thread reads `RssAnon` from `/proc/self/status` every two milliseconds: pages of
memory-mapped files, which the kernel can drop, do not count. Prints the peaks beside what they may be:
while saving, the live model plus its two largest modules plus one write buffer; while loading, the
model plus one read buffer.
"""

import argparse
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

from .process import anonymous, peak

MIB = 1 << 20
#: `vllm_sharded_state.filling.AHEAD`: bytes fetched ahead; a writer takes less.
BUFFER = 64 * MIB


def growth(work: Callable[[], Any]) -> tuple[int, int]:
    """Run `work`; returns how much anonymous memory it took at most, and how much it keeps."""
    before = anonymous()
    most = peak(work)
    return most, anonymous() - before


def module_sizes(model: Any) -> list[int]:
    """Bytes of source weights of each module, largest first, from the shapes it was built with."""
    from vllm.model_executor.model_loader.reload.layerwise import get_layerwise_info

    sizes = []
    for module in model.modules():
        parameters, buffers = get_layerwise_info(module).restore_metadata
        sizes.append(sum(t.numel() * t.element_size() for t in {**parameters, **buffers}.values()))
    return sorted(sizes, reverse=True)


def step(task: dict[str, Any]) -> dict[str, Any]:
    """One step in this process: load a model, and save it when asked to."""
    os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"
    from vllm import LLM
    from vllm.plugins import load_general_plugins

    load_general_plugins()  # first the plugin, so that what is measured is the patched loader
    found: dict[str, Any] = {}
    engine = {"enforce_eager": True, "max_model_len": 256, "block_size": 32, **task["engine"]}
    engine["gpu_memory_utilization"] = 0.3  # on the CPU: of the host's memory, which others use too
    if task["out"] is None:
        from vllm.model_executor.model_loader import sharded_state_loader

        loader = sharded_state_loader.ShardedStateLoader
        patched = loader.load_model

        def measured(self: Any, *args: Any, **kwargs: Any) -> Any:
            models: list[Any] = []
            found["growth"] = growth(lambda: models.append(patched(self, *args, **kwargs)))
            return models[0]

        loader.load_model = measured  # type: ignore[method-assign]
    llm = LLM(task["model"], **engine)
    model = llm.llm_engine.model_executor.driver_worker.model_runner.model
    found["modules"] = module_sizes(model)
    if task["out"] is not None:
        save = llm.llm_engine.engine_core.save_sharded_state
        found["growth"] = growth(lambda: save(path=task["out"], pattern=None, max_size=None))
    return found


def run(task: dict[str, Any]) -> dict[str, Any]:
    """Run `step` in a new process."""
    with tempfile.NamedTemporaryFile("r", suffix=".json") as result:
        command = [sys.executable, "-m", "benchmarks.peak_memory", "--step"]
        command += [json.dumps(task), result.name]
        subprocess.run(command, check=True, stdout=subprocess.DEVNULL)
        return json.load(result)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("model", nargs="?")
    parser.add_argument("--kv-cache-dtype", default="auto")
    parser.add_argument("--layout", default="auto")
    parser.add_argument("--step", nargs=2, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.step:
        task, result = arguments.step
        Path(result).write_text(json.dumps(step(json.loads(task))))
        return
    if arguments.model is None:
        parser.error("name a model: a directory or hub id")
    os.environ["VSS_LAYOUT"] = arguments.layout
    engine = {"kv_cache_dtype": arguments.kv_cache_dtype}
    with tempfile.TemporaryDirectory() as out:
        saved = run({"model": arguments.model, "out": out, "engine": engine})
        loaded = run(
            {"model": out, "out": None, "engine": {**engine, "load_format": "sharded_state"}}
        )
    most, _ = saved["growth"]
    report("save", most, sum(saved["modules"][:2]), "two largest modules")
    most, kept = loaded["growth"]
    report("load", most, kept, "the model as it stays in memory")


def report(name: str, peak: int, base: int, what: str) -> None:
    bound = base + BUFFER
    print(
        f"{name}: peak {peak / MIB:.0f} MiB over the start; bound {bound / MIB:.0f} MiB ({what}, "
        f"{base / MIB:.0f} MiB, and one buffer); ratio {peak / bound:.2f}"
    )


if __name__ == "__main__":
    main()
