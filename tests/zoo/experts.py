"""Mixtures of experts: Mixtral, Qwen3-MoE and gpt-oss, two layers of four experts each."""

from tests.zoo.checkpoint import Checkpoint, gain, noise
from tests.zoo.decoders import (
    HEAD_DIM,
    HEADS,
    HIDDEN,
    KV_HEADS,
    LAYERS,
    attention,
    base_config,
    ends,
    qwen3,
)

EXPERTS, EXPERT_INTER = 4, 64


def mixtral() -> Checkpoint:
    config = base_config(
        "MixtralForCausalLM",
        "mixtral",
        256,
        intermediate_size=EXPERT_INTER,
        num_local_experts=EXPERTS,
        num_experts_per_tok=2,
        sliding_window=None,
        hidden_act="silu",
    )
    tensors = ends(256, HIDDEN, False, 0)
    for layer in range(LAYERS):
        prefix = f"model.layers.{layer}"
        tensors |= attention(f"{prefix}.self_attn", HEADS, KV_HEADS, HEAD_DIM, HIDDEN, 0)
        for norm in ("input_layernorm", "post_attention_layernorm"):
            tensors[f"{prefix}.{norm}.weight"] = gain(f"{prefix}.{norm}", HIDDEN)
        moe = f"{prefix}.block_sparse_moe"
        tensors[f"{moe}.gate.weight"] = noise(f"{moe}.gate", EXPERTS, HIDDEN)
        for expert in range(EXPERTS):
            for name in ("w1", "w2", "w3"):
                shape = (HIDDEN, EXPERT_INTER) if name == "w2" else (EXPERT_INTER, HIDDEN)
                key = f"{moe}.experts.{expert}.{name}"
                tensors[f"{key}.weight"] = noise(key, *shape)
    return Checkpoint(config, tensors)


def qwen3_moe() -> Checkpoint:
    checkpoint = qwen3()
    checkpoint.config |= {
        "architectures": ["Qwen3MoeForCausalLM"],
        "model_type": "qwen3_moe",
        "moe_intermediate_size": EXPERT_INTER,
        "num_experts": EXPERTS,
        "num_experts_per_tok": 2,
        "norm_topk_prob": True,
        "decoder_sparse_step": 1,
        "mlp_only_layers": [],
    }
    tensors = {k: v for k, v in checkpoint.tensors.items() if ".mlp." not in k}
    for layer in range(LAYERS):
        prefix = f"model.layers.{layer}.mlp"
        tensors[f"{prefix}.gate.weight"] = noise(f"{prefix}.gate", EXPERTS, HIDDEN)
        for expert in range(EXPERTS):
            for name in ("gate_proj", "up_proj", "down_proj"):
                down = name == "down_proj"
                shape = (HIDDEN, EXPERT_INTER) if down else (EXPERT_INTER, HIDDEN)
                key = f"{prefix}.experts.{expert}.{name}"
                tensors[f"{key}.weight"] = noise(key, *shape)
    return Checkpoint(checkpoint.config, tensors)


def gpt_oss() -> Checkpoint:
    """gpt-oss in bf16: attention sinks and biases, expert biases, interleaved gate and up rows."""
    config = base_config(
        "GptOssForCausalLM",
        "gpt_oss",
        256,
        intermediate_size=EXPERT_INTER,
        num_local_experts=EXPERTS,
        num_experts_per_tok=2,
        experts_per_token=2,
        sliding_window=64,
        layer_types=["sliding_attention", "full_attention"],
        hidden_act="silu",
        attention_bias=True,
        swiglu_limit=7.0,
        rope_theta=10000.0,
        rope_scaling=None,
    )
    tensors = ends(256, HIDDEN, False, 0)
    for layer in range(LAYERS):
        prefix = f"model.layers.{layer}"
        attn = attention(f"{prefix}.self_attn", HEADS, KV_HEADS, HEAD_DIM, HIDDEN, 0)
        biases = {
            key.replace(".weight", ".bias"): noise(f"{key}.bias", value.shape[0], std=0.2)
            for key, value in attn.items()
        }
        tensors |= attn | biases
        tensors[f"{prefix}.self_attn.sinks"] = noise(f"{prefix}.sinks", HEADS, std=1.0)
        for norm in ("input_layernorm", "post_attention_layernorm"):
            tensors[f"{prefix}.{norm}.weight"] = gain(f"{prefix}.{norm}", HIDDEN)
        moe = f"{prefix}.mlp"
        tensors |= {
            f"{moe}.router.weight": noise(f"{moe}.router", EXPERTS, HIDDEN),
            f"{moe}.router.bias": noise(f"{moe}.router.bias", EXPERTS, std=0.2),
            f"{moe}.experts.gate_up_proj": noise(
                f"{moe}.gate_up", EXPERTS, HIDDEN, 2 * EXPERT_INTER, std=HIDDEN**-0.5
            ),
            f"{moe}.experts.gate_up_proj_bias": noise(
                f"{moe}.gate_up.bias", EXPERTS, 2 * EXPERT_INTER, std=0.2
            ),
            f"{moe}.experts.down_proj": noise(
                f"{moe}.down", EXPERTS, EXPERT_INTER, HIDDEN, std=EXPERT_INTER**-0.5
            ),
            f"{moe}.experts.down_proj_bias": noise(f"{moe}.down.bias", EXPERTS, HIDDEN, std=0.2),
        }
    return Checkpoint(config, tensors)
