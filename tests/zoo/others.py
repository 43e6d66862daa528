"""What is neither a plain decoder nor an expert mixture: a BERT pooling model, and latent attention."""

import json

from tests.zoo.checkpoint import Checkpoint, gain, noise
from tests.zoo.decoders import HIDDEN, INTER, LAYERS, base_config, ends, mlp
from tests.zoo.experts import EXPERT_INTER, EXPERTS


def bert() -> Checkpoint:
    """A BERT encoder with its pooler, for embeddings."""
    hidden, inter, heads, vocab, positions = 64, 128, 2, 256, 128
    config = {
        "architectures": ["BertModel"],
        "model_type": "bert",
        "hidden_size": hidden,
        "intermediate_size": inter,
        "num_hidden_layers": LAYERS,
        "num_attention_heads": heads,
        "vocab_size": vocab,
        "max_position_embeddings": positions,
        "type_vocab_size": 2,
        "hidden_act": "gelu",
        "layer_norm_eps": 1e-12,
        "position_embedding_type": "absolute",
        "pad_token_id": 0,
        "dtype": "bfloat16",
    }
    tensors = {
        "embeddings.word_embeddings.weight": noise("word", vocab, hidden, std=1.0),
        "embeddings.position_embeddings.weight": noise("position", positions, hidden, std=1.0),
        "embeddings.token_type_embeddings.weight": noise("type", 2, hidden, std=1.0),
        "embeddings.LayerNorm.weight": gain("emb.norm", hidden),
        "embeddings.LayerNorm.bias": noise("emb.norm.bias", hidden, std=0.2),
    }
    for layer in range(LAYERS):
        prefix = f"encoder.layer.{layer}"
        linears = {
            "attention.self.query": (hidden, hidden),
            "attention.self.key": (hidden, hidden),
            "attention.self.value": (hidden, hidden),
            "attention.output.dense": (hidden, hidden),
            "intermediate.dense": (inter, hidden),
            "output.dense": (hidden, inter),
        }
        for name, shape in linears.items():
            key = f"{prefix}.{name}"
            tensors[f"{key}.weight"] = noise(key, *shape)
            tensors[f"{key}.bias"] = noise(f"{key}.bias", shape[0], std=0.2)
        for name in ("attention.output.LayerNorm", "output.LayerNorm"):
            key = f"{prefix}.{name}"
            tensors[f"{key}.weight"] = gain(key, hidden)
            tensors[f"{key}.bias"] = noise(f"{key}.bias", hidden, std=0.2)
    # vLLM's pooling entry points ask for a tokenizer, even where prompts are token ids.
    words = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]"] + [f"w{i}" for i in range(5, vocab)]
    files = {
        "vocab.txt": "\n".join(words) + "\n",
        "tokenizer_config.json": json.dumps({"tokenizer_class": "BertTokenizer"}),
    }
    return Checkpoint(config, tensors, files)


def deepseek_v2() -> Checkpoint:
    """DeepSeek-V2, one dense layer and one of experts, a shared one among them.

    The CPU's latent-attention decode kernel is built for a latent of 512 and 64 rotary dimensions.
    """
    heads, nope, rope, value, rank = 2, 64, 64, 64, 512
    config = base_config(
        "DeepseekV2ForCausalLM",
        "deepseek_v2",
        256,
        num_attention_heads=heads,
        num_key_value_heads=heads,
        head_dim=rope,
        q_lora_rank=None,
        kv_lora_rank=rank,
        qk_nope_head_dim=nope,
        qk_rope_head_dim=rope,
        v_head_dim=value,
        n_routed_experts=EXPERTS,
        n_shared_experts=1,
        num_experts_per_tok=2,
        moe_intermediate_size=EXPERT_INTER,
        moe_layer_freq=1,
        first_k_dense_replace=1,
        routed_scaling_factor=1.0,
        topk_method="greedy",
        n_group=1,
        topk_group=1,
        norm_topk_prob=False,
        scoring_func="softmax",
        hidden_act="silu",
        attention_bias=False,
        rope_theta=10000.0,
        rope_scaling=None,
    )
    tensors = ends(256, HIDDEN, False, 0)
    for layer in range(LAYERS):
        prefix = f"model.layers.{layer}"
        attn = f"{prefix}.self_attn"
        shapes = {
            "q_proj": (heads * (nope + rope), HIDDEN),
            "kv_a_proj_with_mqa": (rank + rope, HIDDEN),
            "kv_b_proj": (heads * (nope + value), rank),
            "o_proj": (HIDDEN, heads * value),
        }
        for name, shape in shapes.items():
            tensors[f"{attn}.{name}.weight"] = noise(f"{attn}.{name}", *shape)
        tensors[f"{attn}.kv_a_layernorm.weight"] = gain(f"{attn}.kv_a_layernorm", rank)
        if layer == 0:
            tensors |= mlp(f"{prefix}.mlp", HIDDEN, INTER, 0)
        else:
            tensors[f"{prefix}.mlp.gate.weight"] = noise(f"{prefix}.gate", EXPERTS, HIDDEN)
            tensors |= mlp(f"{prefix}.mlp.shared_experts", HIDDEN, EXPERT_INTER, 0)
            for expert in range(EXPERTS):
                tensors |= mlp(f"{prefix}.mlp.experts.{expert}", HIDDEN, EXPERT_INTER, 0)
        for norm in ("input_layernorm", "post_attention_layernorm"):
            tensors[f"{prefix}.{norm}.weight"] = gain(f"{prefix}.{norm}", HIDDEN)
    return Checkpoint(config, tensors)
