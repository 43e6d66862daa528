"""How long a running model takes to be given weights: from sharded state, or from the source checkpoint.

    python benchmarks/reload_sharded.py [--kind bf16] [--layers 12] [--hidden 1024] [--rounds 7]

The same random model for all, at model level, each contender in a process of its own; files lie in the
page cache. `stock` and `source` reload the source checkpoint, without this package and with it; `sharded`
reloads what was saved of the same weights, in runtime layout, and `unverified` does so with the key
`verify` set to `off`. Prints median seconds, those that all cores worked, and how
many times as fast as stock each is.

Kinds: `bf16`, a Llama whose weights stay in tensors, as on a GPU; `fp8`, the same with static FP8
linears, which processing requantizes and transposes. (Plain PyTorch stands in for their kernels, which
a reload runs only to check them.)
"""

import vss_test_ways

vss_test_ways.keep_out()  # Before anything imports vLLM.

import argparse  # noqa: E402
import json  # noqa: E402
import os  # noqa: E402
import statistics  # noqa: E402
import subprocess  # noqa: E402
import sys  # noqa: E402
import tempfile  # noqa: E402
import time  # noqa: E402
from pathlib import Path  # noqa: E402
from typing import Any  # noqa: E402

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

from benchmarks import page_cache  # noqa: E402
from benchmarks.reload_overhead import config, tensors  # noqa: E402

_SHARDED = {"load_format": "sharded_state"}
#: Engine arguments by contender.
CONTENDERS: dict[str, dict[str, Any]] = {
    "stock": {},
    "source": {},
    "sharded": _SHARDED,
    "unverified": _SHARDED | {"model_loader_extra_config": {"verify": "off"}},
}

#: The way to run vLLM without a GPU, by kind.
KINDS = {"bf16": "tensors", "fp8": "reference"}


def write(directory: Path, args: argparse.Namespace) -> None:
    """Write the source checkpoint."""
    from tests.zoo.checkpoint import Checkpoint
    from tests.zoo.quantize import fp8_static

    settings = config(args)
    checkpoint = Checkpoint(settings, tensors(settings))
    (fp8_static(checkpoint) if args.kind == "fp8" else checkpoint).write(directory, files=1)


def save(source: str, target: str) -> None:
    """Save the sharded state of the model at `source`, and print the layouts of its linear layers."""
    from vllm.model_executor.model_loader import ShardedStateLoader

    from tests.support.model_level import loaded

    Path(target).mkdir()
    with loaded(Path(source), {}) as model:
        ShardedStateLoader.save_model(model, target)
    units = json.loads(Path(target, "sharded_state.json").read_text())["ranks"][0]["units"]
    layouts = {unit["layout"] for name, unit in units.items() if name.endswith("_proj")}
    print("RESULT", json.dumps(sorted(layouts)))


def measure(path: str, name: str, rounds: int) -> None:
    """Print the seconds of `rounds` reloads of `path`, as JSON, after one that is not counted."""
    from vllm.config import set_current_vllm_config
    from vllm.model_executor.model_loader import base_loader
    from vllm.model_executor.model_loader.reload import inplace

    from tests.support.model_level import loaded

    seen: list[Any] = []
    original = base_loader.initialize_model

    def initialize_model(vllm_config: Any, *args: Any, **kwargs: Any) -> Any:
        seen.append(vllm_config)
        return original(vllm_config, *args, **kwargs)

    base_loader.initialize_model = initialize_model
    files = sorted(Path(path).glob("*.safetensors"))
    page_cache.make_warm(files)
    seconds, processor = [], []
    with loaded(Path(path), CONTENDERS[name]) as model:
        for _ in range(rounds + 1):
            began, worked = time.perf_counter(), time.process_time()
            with set_current_vllm_config(seen[0]):
                inplace.reload_weights(seen[0], model, None, path, True)
            seconds.append(time.perf_counter() - began)
            processor.append(time.process_time() - worked)
    found = {"seconds": seconds[1:], "processor": processor[1:]}
    print("RESULT", json.dumps(found | {"bytes": sum(file.stat().st_size for file in files)}))


def _run(way: str, plugins: str, *arguments: str) -> Any:
    """What this program prints as its result in a process of its own."""
    from tests.support.model_level import environment

    done = subprocess.run(
        [sys.executable, __file__, *arguments],
        env=environment(way, plugins)
        | {"OMP_NUM_THREADS": str(len(os.sched_getaffinity(0)))}
        | {"PYTHONPATH": os.environ.get("PYTHONPATH", str(ROOT))},
        stdout=subprocess.PIPE,
        text=True,
        check=True,
    )
    (line,) = (x for x in done.stdout.splitlines() if x.startswith("RESULT "))
    return json.loads(line.removeprefix("RESULT "))


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--layers", type=int, default=12)
    parser.add_argument("--hidden", type=int, default=1024)
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--kind", choices=KINDS, default="bf16")
    parser.add_argument("--save", nargs=2, help=argparse.SUPPRESS)
    parser.add_argument("--measure", nargs=2, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.save:
        save(*args.save)
        return
    if args.measure:
        measure(*args.measure, args.rounds)
        return
    from tests.support.lab import WITH_OURS, without_ours

    medians: dict[str, float] = {}
    with tempfile.TemporaryDirectory() as directory:
        source, target = Path(directory, "source"), Path(directory, "sharded")
        write(source, args)
        way = KINDS[args.kind]
        layouts = _run(way, WITH_OURS, "--save", str(source), str(target))
        print(f"linear layers were saved in {' and '.join(layouts)} layout")
        for name in CONTENDERS:
            plugins = without_ours(way) if name == "stock" else WITH_OURS
            path = target if CONTENDERS[name] else source
            rounds = ("--rounds", str(args.rounds))
            result = _run(way, plugins, "--measure", str(path), name, *rounds)
            medians[name] = statistics.median(result["seconds"])
            print(
                f"{name:10} {medians[name]:.3f} s (of {args.rounds}: "
                f"{min(result['seconds']):.3f} to {max(result['seconds']):.3f}; "
                f"{statistics.median(result['processor']):.3f} s of all cores), "
                f"{result['bytes'] / 2**20:.0f} MiB, {medians['stock'] / medians[name]:.1f} times as "
                "fast as stock"
            )


if __name__ == "__main__":
    main()
