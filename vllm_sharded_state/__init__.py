"""Weights that come back: exact save and load of vLLM's sharded state.

The package plugs into vLLM through its entry-point group `vllm.general_plugins`; importing it does
nothing by itself and imports neither torch nor vLLM.
"""

from collections.abc import Iterable
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import torch

__version__ = "0.1.0"
__all__ = ["__version__", "digest"]


def digest(weights: "Iterable[tuple[str, torch.Tensor]]") -> str:
    """The digest of names with tensors, in any order, as a reload reports it under `sent`.

    Whoever sends weights to an engine computes it over the same pairs, and compares. Needs torch, and
    not vLLM. 32 hexadecimal digits, over name, dtype, shape and bytes of each tensor; XXH3 with 128
    bits, so no signature.
    """
    from vllm_sharded_state.checkpoint.digest import digest

    return digest(weights)
