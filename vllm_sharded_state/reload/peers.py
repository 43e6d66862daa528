"""All ranks of an engine take new weights, or none does."""

import torch
from vllm.distributed import parallel_state


def failures(error: BaseException | None) -> list[str]:
    """What failed on other ranks; every rank calls this once for each reload, with its own `error`.

    A collective over the engine's ranks, on the host; without other ranks nothing is exchanged.
    """
    if not (torch.distributed.is_available() and torch.distributed.is_initialized()):
        return []
    group = parallel_state.get_world_group()
    if group.world_size == 1:
        return []
    said = None if error is None else f"{type(error).__name__}: {error}"
    everybody: list[str | None] = [None] * group.world_size
    torch.distributed.all_gather_object(everybody, said, group=group.cpu_group)
    return [
        f"rank {rank}: {text.splitlines()[0]}"
        for rank, text in enumerate(everybody)
        if text is not None and rank != group.rank_in_group
    ]
