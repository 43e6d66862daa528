"""Kinds of models that are looked at in reloads only, beside those of the zoo."""

from tests.reload.checkpoints import updated
from tests.zoo import decoders, multimodal
from tests.zoo.checkpoint import Builder, Checkpoint
from tests.zoo.kinds import KINDS, Kind

EMBED, HEAD = "model.embed_tokens.weight", "lm_head.weight"


def _named(architecture: str) -> Builder:
    """A Llama that `tests.reload.toys` registers."""

    def build() -> Checkpoint:
        checkpoint = decoders.llama()
        checkpoint.config["architectures"] = [architecture]
        return checkpoint

    return build


def _with_head(same: bool) -> Builder:
    """The configuration ties the head; the checkpoint has one nevertheless, of equal content or not."""

    def build() -> Checkpoint:
        checkpoint = decoders.llama(vocab=250)
        checkpoint.config["tie_word_embeddings"] = True
        if same:
            checkpoint.tensors[HEAD] = checkpoint.tensors[EMBED].clone()
        return checkpoint

    return build


MORE = {
    kind.name: kind
    for kind in [
        Kind("llama-hook", _named("LlamaWithHook")),
        Kind("llama-computes", _named("LlamaThatComputes")),
        Kind("llama-retied", _with_head(same=True)),
        Kind("llama-untied", _with_head(same=False)),
        Kind("paligemma", multimodal.paligemma),
        # Linear layers whose kernel takes FP8 weights with a scale a channel on any CPU.
        Kind("llama-online", decoders.llama, {"quantization": "fp8_per_channel"}),
    ]
}
ALL: dict[str, Kind] = KINDS | MORE
#: Kinds whose models this module registers.
REGISTERED = {"llama-hook": "tests.reload.toys", "llama-computes": "tests.reload.toys"}


def new(kind: str) -> Checkpoint:
    """The checkpoint that a model of `kind` is updated to."""
    checkpoint = updated(ALL[kind].build())
    if kind == "llama-retied":
        checkpoint.tensors[HEAD] = checkpoint.tensors[EMBED].clone()
    return checkpoint
