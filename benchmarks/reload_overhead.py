"""What a reload that can be taken back costs, beside vLLM's own reload of the same bf16 model.

    python benchmarks/reload_overhead.py [--layers 12] [--hidden 1024] [--rounds 7] [--way tensors]

Each way of reloading runs in a process of its own at model level, on the same random Llama, from tensors
that are in memory already and change with each reload. Prints the median seconds of a reload, those of
the processor, which other processes disturb less, and their ratio: `model` keeps an undo log of
everything, `layer` none. Weights are left in tensors, as on a GPU, unless `--way packed`.
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


def config(args: argparse.Namespace) -> dict[str, Any]:
    from tests.zoo.decoders import base_config

    return base_config(
        "LlamaForCausalLM",
        "llama",
        32000,
        hidden_size=args.hidden,
        intermediate_size=4 * args.hidden,
        num_hidden_layers=args.layers,
        num_attention_heads=args.hidden // 64,
        num_key_value_heads=args.hidden // 64,
        head_dim=64,
        hidden_act="silu",
        attention_bias=False,
    )


def tensors(settings: dict[str, Any]) -> dict[str, Any]:
    """Random weights for that configuration, in the order of a checkpoint."""
    import torch

    hidden, inner = settings["hidden_size"], settings["intermediate_size"]
    shapes = {"model.embed_tokens.weight": (settings["vocab_size"], hidden)}
    for layer in range(settings["num_hidden_layers"]):
        prefix = f"model.layers.{layer}"
        shapes |= {f"{prefix}.self_attn.{x}_proj.weight": (hidden, hidden) for x in "qkvo"}
        shapes |= {f"{prefix}.mlp.{x}_proj.weight": (inner, hidden) for x in ("gate", "up")}
        shapes[f"{prefix}.mlp.down_proj.weight"] = (hidden, inner)
        for norm in ("input_layernorm", "post_attention_layernorm"):
            shapes[f"{prefix}.{norm}.weight"] = (hidden,)
    shapes |= {"model.norm.weight": (hidden,), "lm_head.weight": (settings["vocab_size"], hidden)}
    return {k: torch.randn(s, dtype=torch.float32).to(torch.bfloat16) for k, s in shapes.items()}


def measure(directory: str, rounds: int) -> None:
    """Print the seconds of `rounds` reloads, as JSON, after two that are not counted."""
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
    seconds, processor = [], []
    with loaded(Path(directory), {"load_format": "dummy"}) as model:
        weights = tensors(json.loads(Path(directory, "config.json").read_text()))
        other = {name: tensor * 1.5 for name, tensor in weights.items()}
        for number in range(rounds + 2):
            sent = (weights, other)[number % 2]
            began, busy = time.perf_counter(), time.process_time()
            with set_current_vllm_config(seen[0]):
                inplace.reload_weights(seen[0], model, iter(sent.items()), None, True)
            processor.append(time.process_time() - busy)
            seconds.append(time.perf_counter() - began)
    size = sum(tensor.nbytes for tensor in weights.values())
    print("RESULT", json.dumps({"seconds": seconds[2:], "cpu": processor[2:], "bytes": size}))


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--layers", type=int, default=12)
    parser.add_argument("--hidden", type=int, default=1024)
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--way", default="tensors")
    parser.add_argument("--directory", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.directory:
        measure(args.directory, args.rounds)
        return
    from tests.support.lab import WITH_OURS, without_ours
    from tests.support.model_level import environment

    medians = {}
    with tempfile.TemporaryDirectory() as directory:
        Path(directory, "config.json").write_text(json.dumps(config(args)))
        for name, plugins in {
            "stock": without_ours(args.way),
            "layer": WITH_OURS,
            "model": WITH_OURS,
        }.items():
            done = subprocess.run(
                [sys.executable, __file__, "--directory", directory, "--rounds", str(args.rounds)],
                env=environment(args.way, plugins)
                | {"VSS_RELOAD_ATOMIC": "model" if name == "stock" else name}
                | {"PYTHONPATH": os.environ.get("PYTHONPATH", str(ROOT))},
                stdout=subprocess.PIPE,
                text=True,
                check=True,
            )
            (line,) = (x for x in done.stdout.splitlines() if x.startswith("RESULT "))
            result = json.loads(line.removeprefix("RESULT "))
            wall, medians[name] = (statistics.median(result[k]) for k in ("seconds", "cpu"))
            print(
                f"{name:6} {wall:.3f} s (of {args.rounds}: "
                f"{min(result['seconds']):.3f} to {max(result['seconds']):.3f}), "
                f"{result['bytes'] / 2**20:.0f} MiB, processor {medians[name]:.3f} s, "
                f"{medians[name] / medians['stock']:.2f} of stock"
            )


if __name__ == "__main__":
    main()
