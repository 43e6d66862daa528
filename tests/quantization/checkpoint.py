"""Checkpoints for the methods: one set of weight files, and a config for each method. Knows no vLLM."""

import json
from pathlib import Path

import torch

from tests.zoo.checkpoint import Checkpoint, Scales
from tests.zoo.decoders import llama

#: Projections that become one layer, in its order.
FUSED = (("q_proj", "k_proj", "v_proj"), ("o_proj",), ("gate_proj", "up_proj"), ("down_proj",))
#: Methods that ask for equal gains in a fused layer.
EQUAL = frozenset({"asserts"})


def _weights(equal: bool, attention: bool) -> Checkpoint:
    """One decoder layer, every projection with a gain of its own, or one for each fused layer."""
    checkpoint = llama()
    checkpoint.config["num_hidden_layers"] = 1
    tensors = {k: v for k, v in checkpoint.tensors.items() if not k.startswith("model.layers.1.")}
    scales = Scales(first=33, step=3)
    for names in FUSED:
        shared = scales.take(1)
        for name in names:
            part = "mlp" if name in ("gate_proj", "up_proj", "down_proj") else "self_attn"
            gain = shared if equal else scales.take(1)
            tensors[f"model.layers.0.{part}.{name}.gain"] = gain.clone()
    if attention:
        tensors["model.layers.0.self_attn.attn.temper"] = torch.tensor([1.5, 2.25, 5.0])
    checkpoint.tensors = tensors
    return checkpoint


def write(root: Path, method: str, seed: int = 0) -> Path:
    """A model directory for `method` below `root`; its weight files are links to shared ones."""
    attention = method.startswith("attention_")
    shared = root / f"weights-{method in EQUAL}-{attention}"
    if not shared.exists():
        _weights(method in EQUAL, attention).write(shared)
    directory = root / f"{method}-{seed}"
    directory.mkdir()
    for path in shared.iterdir():
        if path.name != "config.json":
            (directory / path.name).symlink_to(path)
    config = json.loads((shared / "config.json").read_text())
    config["quantization_config"] = {
        "quant_method": "vss_methods",
        "method": method,
        "seed": seed,
    }
    (directory / "config.json").write_text(json.dumps(config))
    return directory
