"""What a model makes of its weights while it loads them, past any weight loader.

Such tensors can't be built for one layer after the other: on the twin, which has no memory, there is
nothing to make them of, and the running model would keep those of the old weights.
"""

import torch
from torch import nn

from vllm_sharded_state.errors import ReloadUnsupportedError, listed
from vllm_sharded_state.state.recording import Recording
from vllm_sharded_state.state.walk import join


class Derived:
    """The tensors of a recording's twin, as they are before anything is loaded."""

    def __init__(self, recording: Recording) -> None:
        self._recording = recording
        self._before = _tensors(recording.twin.model)

    def refuse(self) -> None:
        """Raise `ReloadUnsupportedError` when loading made or replaced a tensor, or computed one."""
        made = [
            path
            for path, tensor in _tensors(self._recording.twin.model).items()
            if tensor is not self._before.get(path) or id(tensor) in self._recording.lost
        ]
        if made:
            raise ReloadUnsupportedError(
                f"While it loads, the model itself computes these tensors:\n{listed(made)}\n"
                "New weights can't be tried out beside the old ones. Start the engine anew."
            )


def _tensors(model: nn.Module) -> dict[str, torch.Tensor]:
    """Parameters, buffers and plain attributes that are tensors, by path."""
    return {
        join(name, key): value
        for name, module in model.named_modules()
        for key, value in {**module._parameters, **module._buffers, **vars(module)}.items()
        if isinstance(value, torch.Tensor)
    }
