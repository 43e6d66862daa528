"""Quantize a model with llm-compressor, calibrated on the few sentences below.

Runs in the quantize environment (`tools/environment.py quantize`): llm-compressor's
compressed-tensors is another version than the one vLLM pins, so the two can't share one.
"""

import argparse
from pathlib import Path
from typing import Any

import torch
from datasets import Dataset
from llmcompressor import oneshot
from llmcompressor.modifiers.quantization import QuantizationModifier
from transformers import AutoModelForCausalLM, AutoTokenizer

SENTENCES = (
    "The lighthouse keeper counted the ships each evening, and wrote their names in a blue book.",
    "Photosynthesis turns light, water and carbon dioxide into sugar and oxygen.",
    "In 1969 two people walked on the Moon while a third one circled above them, alone.",
    "To bake bread you need flour, water, salt, yeast, a warm kitchen and some patience.",
    "def area(width, height):\n    return width * height\n\nprint(area(3, 4))  # 12",
    "The court ruled on Tuesday that the contract had been broken, and that damages were due.",
    "La mer est calme ce matin, et les bateaux rentrent au port avec du poisson.",
    "A triangle whose sides measure 3, 4 and 5 has a right angle, since 9 + 16 = 25.",
    "She asked whether the train to Vienna still stops at the old station; nobody knew.",
    "Prices rose by 2.3 percent in March, mostly because fuel and housing became dearer.",
    "Der Regen fiel die ganze Nacht, und am Morgen stand der Keller unter Wasser.",
    "Bees find their way home by the sun, by landmarks, and by the smell of the hive.",
)


def kv_scheme(strategy: str) -> dict[str, Any]:
    """Return llm-compressor's scheme of an FP8 KV cache, one scale per `strategy`."""
    return {
        "num_bits": 8,
        "type": "float",
        "strategy": strategy,
        "dynamic": False,
        "symmetric": True,
    }


# Where only the KV cache is quantized, `lm_head` is left out all the same: as a target it would be
# untied from the embeddings and written a second time.
SCHEMES: dict[str, dict[str, Any]] = {
    "kv": {"ignore": ["lm_head"], "kv_cache_scheme": kv_scheme("tensor")},
    "kv-head": {"ignore": ["lm_head"], "kv_cache_scheme": kv_scheme("attn_head")},
    "w8a8-kv": {
        "scheme": "W8A8",
        "targets": ["Linear"],
        "ignore": ["lm_head"],
        "kv_cache_scheme": kv_scheme("tensor"),
    },
}


def calibration(source: Path) -> Dataset:
    """Return the sentences as token ids, one row each, each opened by <bos>."""
    tokenizer = AutoTokenizer.from_pretrained(source)
    rows = [tokenizer(sentence).input_ids for sentence in SENTENCES]
    if any(row[0] != tokenizer.bos_token_id for row in rows):
        raise ValueError(
            f"the tokenizer in {source} does not open a sentence with <bos>, without which Gemma"
            " writes noise: prepare the model again with tools/prepare_gemma.py"
        )
    return Dataset.from_dict({"input_ids": rows, "attention_mask": [[1] * len(r) for r in rows]})


def main() -> None:
    """Quantize SOURCE by SCHEME and write OUT, a compressed-tensors checkpoint."""
    parser = argparse.ArgumentParser(description="Quantize a model with llm-compressor.")
    parser.add_argument("scheme", choices=sorted(SCHEMES))
    parser.add_argument("source", type=Path, help="a checkpoint that transformers can read")
    parser.add_argument("out", type=Path, help="directory to write the checkpoint to")
    args = parser.parse_args()

    model = AutoModelForCausalLM.from_pretrained(args.source, dtype=torch.bfloat16)
    oneshot(
        model=model,
        dataset=calibration(args.source),
        recipe=[QuantizationModifier(**SCHEMES[args.scheme])],
        num_calibration_samples=len(SENTENCES),
        # The observers keep a moving average, so another order gives other scales.
        shuffle_calibration_samples=False,
        max_seq_length=128,
    )
    model.save_pretrained(args.out, save_compressed=True)
    AutoTokenizer.from_pretrained(args.source).save_pretrained(args.out)


if __name__ == "__main__":
    main()
