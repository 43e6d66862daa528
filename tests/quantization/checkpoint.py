"""Checkpoints for the methods: one set of weight files, and a config for each method. Knows no vLLM."""

import json
from pathlib import Path

import torch

from tests.zoo.checkpoint import Checkpoint, Scales
from tests.zoo.decoders import llama
from tests.zoo.experts import mixtral

#: Projections that become one layer, in its order.
FUSED = (("q_proj", "k_proj", "v_proj"), ("o_proj",), ("gate_proj", "up_proj"), ("down_proj",))


def _one_layer(checkpoint: Checkpoint) -> Checkpoint:
    checkpoint.config["num_hidden_layers"] = 1
    for key in [key for key in checkpoint.tensors if key.startswith("model.layers.1.")]:
        del checkpoint.tensors[key]
    return checkpoint


def _dense(equal: bool) -> Checkpoint:
    """Every projection with a gain of its own, or one for each fused layer."""
    checkpoint = _one_layer(llama())
    scales = Scales(first=33, step=3)
    for names in FUSED:
        shared = scales.take(1)
        for name in names:
            part = "mlp" if name in ("gate_proj", "up_proj", "down_proj") else "self_attn"
            gain = shared if equal else scales.take(1)
            checkpoint.tensors[f"model.layers.0.{part}.{name}.gain"] = gain.clone()
    return checkpoint


def _tempered() -> Checkpoint:
    checkpoint = _dense(equal=False)
    checkpoint.tensors["model.layers.0.self_attn.attn.temper"] = torch.tensor([1.5, 2.25, 5.0])
    return checkpoint


#: What a method loads, by the first word of its name; the rest load the last.
_BUILDERS = {
    "attention": _tempered,
    "experts": lambda: _one_layer(mixtral()),
    "asserts": lambda: _dense(equal=True),
    "dense": lambda: _dense(equal=False),
}


def write(root: Path, method: str, seed: int = 0) -> Path:
    """A model directory for `method` below `root`; its weight files are links to shared ones."""
    word = method.partition("_")[0]
    kind = word if word in _BUILDERS else "dense"
    shared = root / f"weights-{kind}"
    if not shared.exists():
        _BUILDERS[kind]().write(shared)
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
