"""Fill a model from sharded state, element by element accounted for.

What: `vllm.model_executor.model_loader.sharded_state_loader.ShardedStateLoader.load_weights`

Why: upstream compares names only. A processed scale (`_k_scale`) does not satisfy the parameter it
    came from (`k_scale`), so FP8 KV-cache models end in `Missing keys`; a tensor smaller than its
    place fills a part of it with a warning; another dtype is cast with a warning; a key without a
    place is a bare `KeyError`.

How: `load.load_weights(loader, model, model_config, upstream)` does the work, with upstream's
    method, bound, as `upstream`.

Since: vLLM 0.32 (seen in 0.32 and 0.33; the file is the same in both).

Until: upstream's `sharded_state` restores processed tensors and counts elements.
"""

import os
from collections.abc import Iterator
from types import MethodType, SimpleNamespace
from typing import Any

import torch

from vllm_sharded_state.patches.contract import Function, Patch
from vllm_sharded_state.patches.inward import inward, stand_in
from vllm_sharded_state.patches.probing import quiet, replaced


def make(original: Function) -> Function:
    """Return `ShardedStateLoader.load_weights` handing over to this package."""

    def load_weights(self: Any, model: torch.nn.Module, model_config: Any) -> None:
        """Fill `model` in place from the sharded state at `model_config.model`.

        Raises:
            ShardedStateError: the checkpoint is not this model's, not whole, or not for here.
        """
        upstream = MethodType(original, self)
        inward("load", "load_weights")(self, model, model_config, upstream)

    return load_weights


def probe() -> bool:
    """Load a toy's `_k_scale`; is the parameter `k_scale` it was made from called missing?

    Upstream lists files before it reads them. It finds its own source file, under a pattern that
    names it; what "the file" holds is given by the toy loader.
    """
    import vllm.distributed
    from vllm.config.load import LoadConfig
    from vllm.model_executor.model_loader import sharded_state_loader as upstream

    class ProbeLoader(upstream.ShardedStateLoader):
        def iterate_over_files(self, paths: list[str]) -> Iterator[tuple[str, torch.Tensor]]:
            yield "_k_scale", torch.tensor(0.5, device="cpu")

    model = torch.nn.Module()
    model.k_scale = torch.nn.Parameter(torch.tensor(-1.0, device="cpu"), requires_grad=False)
    model.register_buffer("_k_scale", torch.tensor(1.0, device="cpu"))
    directory, file = os.path.split(upstream.__file__)
    loader = object.__new__(ProbeLoader)
    loader.load_config = LoadConfig(load_format="sharded_state")
    loader.pattern = file
    handed_over: list[Any] = []
    one_rank = SimpleNamespace(world_size=1)
    with (
        quiet(upstream.logger),
        replaced(
            vllm.distributed,
            get_pp_group=lambda: one_rank,
            get_tp_group=lambda: one_rank,
            get_pipeline_model_parallel_rank=lambda: 0,
            get_tensor_model_parallel_rank=lambda: 0,
        ),
        stand_in("load", "load_weights", lambda *arguments: handed_over.append(arguments)),
    ):
        try:
            loader.load_weights(model, SimpleNamespace(model=directory, model_weights=None))
        except ValueError:
            return True
    return not handed_over and model._k_scale.item() != 0.5


PATCH = Patch(
    name="sharded_state_load_weights",
    module="vllm.model_executor.model_loader.sharded_state_loader",
    symbol="ShardedStateLoader.load_weights",
    probe=probe,
    make=make,
)
