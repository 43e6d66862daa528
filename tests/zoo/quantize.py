"""Turn a bf16 checkpoint into a quantized one: KV scales, int8, FP8 and packed int4 linears."""

from collections.abc import Iterator
from typing import Any

import torch

from tests.zoo.checkpoint import Checkpoint, Scales

FP8 = torch.float8_e4m3fn


def _linears(checkpoint: Checkpoint) -> Iterator[tuple[str, torch.Tensor]]:
    """Prefix and weight of every linear of a decoder layer (not embeddings, `lm_head`, norms)."""
    for key in sorted(checkpoint.tensors):
        if key.endswith("_proj.weight"):
            yield key.removesuffix(".weight"), checkpoint.tensors[key]


def _attentions(checkpoint: Checkpoint) -> list[str]:
    return sorted({k.rsplit(".", 2)[0] for k in checkpoint.tensors if k.endswith("q_proj.weight")})


def _compressed_tensors(checkpoint: Checkpoint) -> dict[str, Any]:
    quantization: dict[str, Any] = checkpoint.config.setdefault(
        "quantization_config",
        {
            "quant_method": "compressed-tensors",
            "format": "dense",
            "quantization_status": "compressed",
            "global_compression_ratio": None,
            "config_groups": {},
            "ignore": ["lm_head"],
        },
    )
    return quantization


def _group(
    weights: dict[str, Any], activations: dict[str, Any] | None, form: str
) -> dict[str, Any]:
    return {
        "group_0": {
            "targets": ["Linear"],
            "weights": weights,
            "input_activations": activations,
            "output_activations": None,
            "format": form,
        }
    }


def kv_per_tensor(checkpoint: Checkpoint) -> Checkpoint:
    """compressed-tensors `kv_cache_scheme` with strategy `tensor`: scales and zero points, shape [1]."""
    return _kv(checkpoint, "tensor")


def kv_per_head(checkpoint: Checkpoint) -> Checkpoint:
    """Strategy `attn_head`: one scale a head, [heads, 1, 1] as llm-compressor writes them."""
    return _kv(checkpoint, "attn_head")


def _kv(checkpoint: Checkpoint, strategy: str) -> Checkpoint:
    _compressed_tensors(checkpoint)["kv_cache_scheme"] = {
        "num_bits": 8,
        "type": "float",
        "strategy": strategy,
        "symmetric": True,
        "dynamic": False,
    }
    scales = Scales()
    heads = checkpoint.config["num_attention_heads"]
    kv_heads = checkpoint.config["num_key_value_heads"]
    for prefix in _attentions(checkpoint):
        for kind, count in (("q", heads), ("k", kv_heads), ("v", kv_heads)):
            shape = (1,) if strategy == "tensor" else (count, 1, 1)
            checkpoint.tensors[f"{prefix}.{kind}_scale"] = scales.take(*shape)
            checkpoint.tensors[f"{prefix}.{kind}_zero_point"] = torch.zeros(shape)
    return checkpoint


def fp8_config_kv_only(checkpoint: Checkpoint) -> Checkpoint:
    """The `fp8` method with every linear left out, and scalar scales as that method stores them."""
    checkpoint.config["quantization_config"] = {
        "quant_method": "fp8",
        "activation_scheme": "static",
        "ignored_layers": [name for name, _ in _linears(checkpoint)] + ["lm_head"],
    }
    return _scalar_kv(checkpoint)


def _scalar_kv(checkpoint: Checkpoint) -> Checkpoint:
    scales = Scales()
    for prefix in _attentions(checkpoint):
        for kind in ("q", "k", "v"):
            checkpoint.tensors[f"{prefix}.{kind}_scale"] = scales.take()
    return checkpoint


def fp8_static(checkpoint: Checkpoint) -> Checkpoint:
    """The `fp8` method: FP8 weights, one weight and one input scale a linear."""
    checkpoint.config["quantization_config"] = {
        "quant_method": "fp8",
        "activation_scheme": "static",
        "ignored_layers": ["lm_head"],
    }
    inputs = Scales(first=1, step=1)
    for prefix, weight in list(_linears(checkpoint)):
        # A power of two times a small odd number: exact in bf16, and not the same for any two.
        scale = (3 + 2 * len(checkpoint.tensors) % 64) / 2**12
        checkpoint.tensors[f"{prefix}.weight"] = (weight.float() / scale).clamp(-448, 448).to(FP8)
        checkpoint.tensors[f"{prefix}.weight_scale"] = torch.tensor(scale)
        checkpoint.tensors[f"{prefix}.input_scale"] = inputs.take()
    return checkpoint


def fp8_static_kv(checkpoint: Checkpoint) -> Checkpoint:
    return _scalar_kv(fp8_static(checkpoint))


def w8a8(checkpoint: Checkpoint) -> Checkpoint:
    """compressed-tensors int8: a weight scale a channel, input scales made while running."""
    return _int8(checkpoint, static=False)


def w8a8_static(checkpoint: Checkpoint) -> Checkpoint:
    """compressed-tensors int8 with asymmetric static inputs: the kernel derives range and zero point."""
    return _int8(checkpoint, static=True)


def _int8(checkpoint: Checkpoint, static: bool) -> Checkpoint:
    quantization = _compressed_tensors(checkpoint)
    quantization["format"] = "int-quantized"
    weights = {"num_bits": 8, "type": "int", "strategy": "channel", "symmetric": True}
    activations = {
        "num_bits": 8,
        "type": "int",
        "strategy": "tensor" if static else "token",
        "symmetric": not static,
        "dynamic": not static,
    }
    quantization["config_groups"] = _group(
        weights | {"dynamic": False}, activations, "int-quantized"
    )
    inputs = Scales(first=1, step=1)
    for prefix, weight in list(_linears(checkpoint)):
        scale = (weight.float().abs().amax(1, keepdim=True) / 127).to(torch.bfloat16)
        quantized = (weight.float() / scale.float()).round().clamp(-128, 127).to(torch.int8)
        checkpoint.tensors[f"{prefix}.weight"] = quantized
        checkpoint.tensors[f"{prefix}.weight_scale"] = scale
        if static:
            checkpoint.tensors[f"{prefix}.input_scale"] = inputs.take(1)
            points = Scales(first=64 * (1 + len(checkpoint.tensors) % 3), step=64)
            checkpoint.tensors[f"{prefix}.input_zero_point"] = points.take(1).to(torch.int8)
    return checkpoint


def w4a16(checkpoint: Checkpoint, group: int = 32) -> Checkpoint:
    """compressed-tensors `pack-quantized`: eight 4-bit values an int32, a scale for each group."""
    quantization = _compressed_tensors(checkpoint)
    quantization["format"] = "pack-quantized"
    quantization["config_groups"] = _group(
        {
            "num_bits": 4,
            "type": "int",
            "strategy": "group",
            "group_size": group,
            "symmetric": True,
            "dynamic": False,
        },
        None,
        "pack-quantized",
    )
    for prefix, weight in list(_linears(checkpoint)):
        rows, columns = weight.shape
        grouped = weight.float().reshape(rows, columns // group, group)
        scale = (grouped.abs().amax(2) / 7).to(torch.bfloat16)
        values = (grouped / scale.float().unsqueeze(2)).round().clamp(-8, 7).to(torch.int32) + 8
        nibbles = values.reshape(rows, columns // 8, 8)
        packed = torch.zeros(rows, columns // 8, dtype=torch.int32)
        for index in range(8):
            packed |= nibbles[:, :, index] << (4 * index)
        del checkpoint.tensors[f"{prefix}.weight"]
        checkpoint.tensors[f"{prefix}.weight_packed"] = packed
        checkpoint.tensors[f"{prefix}.weight_scale"] = scale
        checkpoint.tensors[f"{prefix}.weight_shape"] = torch.tensor([rows, columns])
    return checkpoint
