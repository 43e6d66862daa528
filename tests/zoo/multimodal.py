"""A model of two parts: PaliGemma, a SigLIP vision tower and a Gemma of two layers each."""

from typing import Any

from tests.zoo.checkpoint import Checkpoint, gain, noise
from tests.zoo.decoders import HIDDEN, LAYERS, base_config, llama

VISION, PATCH, IMAGE = 64, 14, 28


def paligemma() -> Checkpoint:
    """Its text model is a tied Gemma: the tensors are a Llama's, the norms are around 0."""
    text = base_config(
        "GemmaForCausalLM",
        "gemma",
        256,
        tie_word_embeddings=True,
        hidden_act="gelu_pytorch_tanh",
        hidden_activation="gelu_pytorch_tanh",
    )
    vision = {
        "model_type": "siglip_vision_model",
        "hidden_size": VISION,
        "intermediate_size": 2 * VISION,
        "num_hidden_layers": LAYERS,
        "num_attention_heads": 2,
        "image_size": IMAGE,
        "patch_size": PATCH,
        "projection_dim": HIDDEN,
    }
    config: dict[str, Any] = {
        "architectures": ["PaliGemmaForConditionalGeneration"],
        "model_type": "paligemma",
        "text_config": text,
        "vision_config": vision,
        "projection_dim": HIDDEN,
        "hidden_size": HIDDEN,
        "image_token_index": 250,
        "vocab_size": 256,
        "tie_word_embeddings": True,
        "dtype": "bfloat16",
    }
    tensors = {
        f"language_model.{name}": tensor - 1 if "norm" in name else tensor
        for name, tensor in llama(tied=True).tensors.items()
    }
    tower = "vision_tower.vision_model"
    shapes = {"multi_modal_projector.linear": (HIDDEN, VISION)}
    norms = [f"{tower}.post_layernorm"]
    for layer in range(LAYERS):
        prefix = f"{tower}.encoder.layers.{layer}"
        attention = [f"{prefix}.self_attn.{name}_proj" for name in ("q", "k", "v", "out")]
        shapes |= dict.fromkeys(attention, (VISION, VISION))
        shapes[f"{prefix}.mlp.fc1"] = (2 * VISION, VISION)
        shapes[f"{prefix}.mlp.fc2"] = (VISION, 2 * VISION)
        norms += [f"{prefix}.layer_norm1", f"{prefix}.layer_norm2"]
    for key, shape in shapes.items():
        tensors[f"{key}.weight"] = noise(key, *shape)
        tensors[f"{key}.bias"] = noise(f"{key}.bias", shape[0], std=0.2)
    for key in norms:
        tensors[f"{key}.weight"] = gain(key, VISION)
        tensors[f"{key}.bias"] = noise(f"{key}.bias", VISION, std=0.2)
    patch = f"{tower}.embeddings.patch_embedding"
    tensors[f"{patch}.weight"] = noise("patch", VISION, 3, PATCH, PATCH, std=0.05)
    tensors[f"{patch}.bias"] = noise("patch.bias", VISION, std=0.2)
    positions = (IMAGE // PATCH) ** 2
    tensors[f"{tower}.embeddings.position_embedding.weight"] = noise("position", positions, VISION)
    return Checkpoint(config, tensors)
