"""How long a running model takes to be given weights: from sharded state, or from the source checkpoint.

    python benchmarks/reload_sharded.py [--kind bf16] [--layers 12] [--hidden 1024] [--rounds 7]

The same random model for all, at model level, each contender in a process of its own; files lie in the
page cache. `stock` and `source` reload the source checkpoint, without this package and with it; `sharded`
reloads what was saved of the same weights, in runtime layout, and `unverified` does so with the key
`verify` set to `off`. Prints median seconds, those that all cores worked, and how many times as fast as
stock each is.

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
import sys  # noqa: E402
import tempfile  # noqa: E402
from pathlib import Path  # noqa: E402
from typing import Any  # noqa: E402

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

from benchmarks import page_cache  # noqa: E402
from benchmarks.reload_overhead import config, tensors  # noqa: E402
from benchmarks.reloading import line, run, tell, timed  # noqa: E402

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
    tell(sorted(layouts))


def measure(path: str, name: str, rounds: int) -> None:
    """Tell the seconds of `rounds` reloads of `path`, after one that is not counted."""
    from vllm.config import set_current_vllm_config
    from vllm.model_executor.model_loader.reload import inplace

    from tests.support.model_level import configured

    files = sorted(Path(path).glob("*.safetensors"))
    page_cache.make_warm(files)
    with configured(Path(path), CONTENDERS[name]) as (model, config):

        def reload(number: int) -> None:
            with set_current_vllm_config(config):
                inplace.reload_weights(config, model, None, path, True)

        found = timed(reload, rounds, warm_up=1)
    tell({**found, "bytes": sum(file.stat().st_size for file in files)})


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
        cores = {"OMP_NUM_THREADS": str(len(os.sched_getaffinity(0)))}
        layouts = run(__file__, way, WITH_OURS, "--save", str(source), str(target), **cores)
        print(f"linear layers were saved in {' and '.join(layouts)} layout")
        for name in CONTENDERS:
            plugins = without_ours(way) if name == "stock" else WITH_OURS
            path = target if CONTENDERS[name] else source
            rounds = ("--rounds", str(args.rounds))
            result = run(__file__, way, plugins, "--measure", str(path), name, *rounds, **cores)
            medians[name] = statistics.median(result["seconds"])
            times = medians["stock"] / medians[name]
            print(f"{line(name, result)}, {times:.1f} times as fast as stock")


if __name__ == "__main__":
    main()
