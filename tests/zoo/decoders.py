"""Dense decoders: Llama, Qwen3 and Gemma 2, two layers each."""

from typing import Any

import torch

from tests.zoo.checkpoint import Checkpoint, gain, noise

HIDDEN, INTER, HEADS, KV_HEADS, HEAD_DIM, LAYERS = 128, 192, 4, 2, 32, 2


def attention(
    prefix: str, heads: int, kv_heads: int, head_dim: int, hidden: int, seed: int
) -> dict:
    sizes = {"q_proj": heads, "k_proj": kv_heads, "v_proj": kv_heads}
    tensors = {
        f"{prefix}.{name}.weight": noise(f"{prefix}.{name}", n * head_dim, hidden, seed=seed)
        for name, n in sizes.items()
    }
    name = f"{prefix}.o_proj"
    return tensors | {f"{name}.weight": noise(name, hidden, heads * head_dim, seed=seed)}


def mlp(prefix: str, hidden: int, inter: int, seed: int) -> dict[str, torch.Tensor]:
    shapes = {
        "gate_proj": (inter, hidden),
        "up_proj": (inter, hidden),
        "down_proj": (hidden, inter),
    }
    return {
        f"{prefix}.{name}.weight": noise(f"{prefix}.{name}", *shape, seed=seed)
        for name, shape in shapes.items()
    }


def ends(vocab: int, hidden: int, tied: bool, seed: int, norm: float = 1.0) -> dict:
    tensors = {
        "model.embed_tokens.weight": noise("embed", vocab, hidden, std=1.0, seed=seed),
        "model.norm.weight": gain("norm", hidden, around=norm, seed=seed),
    }
    if not tied:
        tensors["lm_head.weight"] = noise("lm_head", vocab, hidden, seed=seed)
    return tensors


def base_config(architecture: str, model_type: str, vocab: int, **more: Any) -> dict[str, Any]:
    return {
        "architectures": [architecture],
        "model_type": model_type,
        "hidden_size": HIDDEN,
        "intermediate_size": INTER,
        "num_hidden_layers": LAYERS,
        "num_attention_heads": HEADS,
        "num_key_value_heads": KV_HEADS,
        "head_dim": HEAD_DIM,
        "vocab_size": vocab,
        "max_position_embeddings": 512,
        "rms_norm_eps": 1e-6,
        "tie_word_embeddings": False,
        "dtype": "bfloat16",
        "bos_token_id": 1,
        "eos_token_id": 2,
    } | more


def llama(
    vocab: int = 256,
    tied: bool = False,
    kv_heads: int = KV_HEADS,
    seed: int = 0,
    bias: bool = False,
) -> Checkpoint:
    """Llama. `vocab` 250 makes vLLM pad the embeddings, `bias` gives the attention biases."""
    config = base_config(
        "LlamaForCausalLM",
        "llama",
        vocab,
        tie_word_embeddings=tied,
        num_key_value_heads=kv_heads,
        hidden_act="silu",
        attention_bias=bias,
    )
    tensors = ends(vocab, HIDDEN, tied, seed)
    for layer in range(LAYERS):
        prefix = f"model.layers.{layer}"
        tensors |= attention(f"{prefix}.self_attn", HEADS, kv_heads, HEAD_DIM, HIDDEN, seed)
        tensors |= mlp(f"{prefix}.mlp", HIDDEN, INTER, seed)
        for norm in ("input_layernorm", "post_attention_layernorm"):
            tensors[f"{prefix}.{norm}.weight"] = gain(f"{prefix}.{norm}", HIDDEN, seed=seed)
        if bias:
            for name in ("q_proj", "k_proj", "v_proj", "o_proj"):
                key = f"{prefix}.self_attn.{name}"
                rows = tensors[f"{key}.weight"].shape[0]
                tensors[f"{key}.bias"] = noise(f"{key}.bias", rows, std=0.5, seed=seed)
    return Checkpoint(config, tensors)


def qwen3() -> Checkpoint:
    config = base_config("Qwen3ForCausalLM", "qwen3", 256, hidden_act="silu", attention_bias=False)
    checkpoint = Checkpoint(config, llama().tensors)
    for layer in range(LAYERS):
        for norm in ("q_norm", "k_norm"):
            name = f"model.layers.{layer}.self_attn.{norm}"
            checkpoint.tensors[f"{name}.weight"] = gain(name, HEAD_DIM)
    return checkpoint


def gemma2() -> Checkpoint:
    """Gemma 2: tied embeddings, norms around 0, soft caps, every second layer with a window."""
    config = base_config(
        "Gemma2ForCausalLM",
        "gemma2",
        256,
        tie_word_embeddings=True,
        hidden_act="gelu_pytorch_tanh",
        hidden_activation="gelu_pytorch_tanh",
        query_pre_attn_scalar=HEAD_DIM,
        attn_logit_softcapping=50.0,
        final_logit_softcapping=30.0,
        sliding_window=64,
        attention_bias=False,
    )
    tensors = ends(256, HIDDEN, True, 0, norm=0.0)
    for layer in range(LAYERS):
        prefix = f"model.layers.{layer}"
        tensors |= attention(f"{prefix}.self_attn", HEADS, KV_HEADS, HEAD_DIM, HIDDEN, 0)
        tensors |= mlp(f"{prefix}.mlp", HIDDEN, INTER, 0)
        for norm in (
            "input_layernorm",
            "post_attention_layernorm",
            "pre_feedforward_layernorm",
            "post_feedforward_layernorm",
        ):
            tensors[f"{prefix}.{norm}.weight"] = gain(f"{prefix}.{norm}", HIDDEN, around=0.0)
    return Checkpoint(config, tensors)
