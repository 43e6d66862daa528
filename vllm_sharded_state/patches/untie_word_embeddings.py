"""Believe the manifest, not the keys, about tied word embeddings.

What: `vllm.config.model.ModelConfig.maybe_untie_word_embeddings`

Why: upstream builds the model untied where the checkpoint holds an `lm_head.weight`, and compares
    the two tensors once loaded. In sharded state the key proves nothing: which of two tied names
    holds the bytes is a matter of the save. Untied, the other name has no key of its own; and while
    tensors are placeholders, comparing them finds ties that are none.

How: `load.retie(model_config)` answers from the manifest: tied, not tied, or None without one.
    With an answer the configuration says the same, and nothing is compared later; without, upstream
    decides.

Since: vLLM 0.32 (seen in 0.32 and 0.33).

Until: upstream leaves directories of sharded state out of the check.
"""

from types import SimpleNamespace
from typing import Any

from vllm_sharded_state.patches.contract import Function, Patch
from vllm_sharded_state.patches.inward import inward, stand_in
from vllm_sharded_state.patches.probing import quiet, replaced


def make(original: Function) -> Function:
    """Return the method with the manifest asked first."""

    def maybe_untie_word_embeddings(self: Any) -> None:
        tied = inward("load", "retie")(self)
        if tied is None:
            original(self)
        elif not tied and getattr(self.hf_config, "tie_word_embeddings", False):
            # The saved model was untied by its own checkpoint; both levels, as upstream has it.
            self.hf_config.tie_word_embeddings = False
            self.hf_config.get_text_config().tie_word_embeddings = False

    return maybe_untie_word_embeddings


def probe() -> bool:
    """Ask about a checkpoint that is tied and holds `lm_head.weight`; is it untied?"""
    import vllm.config.model as upstream

    hf_config = SimpleNamespace(tie_word_embeddings=True)
    hf_config.get_text_config = lambda: hf_config
    config = SimpleNamespace(model="probe", revision=None, hf_config=hf_config)
    with (
        quiet(upstream.logger),
        replaced(upstream, checkpoint_has_lm_head=lambda *args, **kwargs: True),
        stand_in("load", "retie", lambda model_config: True),
    ):
        upstream.ModelConfig.maybe_untie_word_embeddings(config)
    return not hf_config.tie_word_embeddings


PATCH = Patch(
    name="untie_word_embeddings",
    module="vllm.config.model",
    symbol="ModelConfig.maybe_untie_word_embeddings",
    probe=probe,
    make=make,
)
