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
import statistics  # noqa: E402
import sys  # noqa: E402
import tempfile  # noqa: E402
from pathlib import Path  # noqa: E402
from typing import Any  # noqa: E402

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

from benchmarks.reloading import line, run, tell, timed  # noqa: E402


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
    """Tell the seconds of `rounds` reloads, after two that are not counted."""
    from vllm.config import set_current_vllm_config
    from vllm.model_executor.model_loader.reload import inplace

    from tests.support.model_level import configured

    with configured(Path(directory), {"load_format": "dummy"}) as (model, config):
        weights = tensors(json.loads(Path(directory, "config.json").read_text()))
        other = {name: tensor * 1.5 for name, tensor in weights.items()}

        def reload(number: int) -> None:
            sent = (weights, other)[number % 2]
            with set_current_vllm_config(config):
                inplace.reload_weights(config, model, iter(sent.items()), None, True)

        found = timed(reload, rounds, warm_up=2)
    tell({**found, "bytes": sum(tensor.nbytes for tensor in weights.values())})


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

    medians = {}
    with tempfile.TemporaryDirectory() as directory:
        Path(directory, "config.json").write_text(json.dumps(config(args)))
        for name, plugins in {
            "stock": without_ours(args.way),
            "layer": WITH_OURS,
            "model": WITH_OURS,
        }.items():
            rounds = ("--rounds", str(args.rounds))
            atomic = "model" if name == "stock" else name
            result = run(
                __file__,
                args.way,
                plugins,
                *("--directory", directory, *rounds),
                VSS_RELOAD_ATOMIC=atomic,
            )
            medians[name] = statistics.median(result["processor"])
            print(f"{line(name, result)}, {medians[name] / medians['stock']:.2f} of stock")


if __name__ == "__main__":
    main()
