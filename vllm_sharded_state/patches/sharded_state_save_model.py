"""Save all of a model, or say what cannot be saved.

What: `vllm.model_executor.model_loader.sharded_state_loader.ShardedStateLoader.save_model`

Why: upstream writes what `state_dict()` shows and skips empty tensors. Where a backend packs a
    weight into a handle and empties its parameter (every linear weight on the CPU), the checkpoint
    lacks the weight, the call returns as if it had worked, and nothing can load the result.

How: `save.save_model(model, path, pattern, max_size)` does the work.

Since: vLLM 0.32 (seen in 0.32 and 0.33; the file is the same in both).

Until: upstream's `save_model` covers packed weights and state outside of `state_dict()`.
"""

import os
from typing import Any

import torch

from vllm_sharded_state.patches.contract import Function, Patch
from vllm_sharded_state.patches.inward import inward, stand_in


def make(original: Function) -> Function:
    """Return `save_model` of this package; upstream's is not called."""

    def save_model(
        model: torch.nn.Module, path: str, pattern: str | None = None, max_size: int | None = None
    ) -> None:
        """Write this rank's state of `model` to the directory `path`.

        Args:
            model: a model built by vLLM while this package was active.
            path: directory that every rank writes to.
            pattern: name of the part files; None for upstream's.
            max_size: bytes after which a new part begins; None for one part.

        Raises:
            ShardedStateError: a module's state cannot be held, or the directory not be written.
        """
        inward("save", "save_model")(model, path, pattern, max_size)

    return save_model


def probe() -> bool:
    """Save a toy whose only weight was emptied, as packing does it; is there no complaint?

    There is nothing left to write, so upstream returns before it opens a file; the path could not
    hold one either.
    """
    from vllm.model_executor.model_loader.sharded_state_loader import ShardedStateLoader

    model = torch.nn.Module()
    model.weight = torch.nn.Parameter(torch.empty(0, device="cpu"), requires_grad=False)
    handed_over: list[Any] = []
    with stand_in("save", "save_model", lambda *arguments: handed_over.append(arguments)):
        try:
            ShardedStateLoader.save_model(model, os.devnull)
        except ValueError:
            return False
    return not handed_over


PATCH = Patch(
    name="sharded_state_save_model",
    module="vllm.model_executor.model_loader.sharded_state_loader",
    symbol="ShardedStateLoader.save_model",
    probe=probe,
    make=make,
)
