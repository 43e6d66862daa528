"""What a reload overwrote, so that it can be put back: bytes in host memory, values and handles as they
were.
"""

from collections.abc import Callable
from typing import Any

import psutil
import torch

from vllm_sharded_state.errors import ReloadBrokenError, ReloadRoomError
from vllm_sharded_state.state.compare import place

#: Host memory that stays free when the log is planned or grows, as a share of what is available.
_SPARE = 0.1
#: Bytes that are exchanged at a time: they stay in the cache meanwhile.
_PIECE = 1 << 18


class UndoLog:
    """Old state, in the order in which it was overwritten. Nothing of it lies on a device.

    nbytes: what it holds, without what native handles hold.
    """

    def __init__(self) -> None:
        self.nbytes = 0
        self._steps: list[Callable[[], object]] = []
        self._places: set[tuple[object, ...]] = set()

    def keep_tensor(self, tensor: torch.Tensor) -> torch.Tensor | None:
        """Keep the bytes of `tensor`, which lies in the model and is about to be overwritten.

        Returns the copy, on the host; None where one was made before.

        Raises:
            ReloadRoomError: the host has no room for them.
        """
        if place(tensor) in self._places:
            return None
        if tensor.nbytes > _room():
            raise ReloadRoomError(
                f"The host has {_gib(_available())} of memory left, and the next layer's old weights "
                f"need {_gib(tensor.nbytes)}. Free some; with VSS_RELOAD_ATOMIC=layer there has to be "
                "room for one layer only."
            )
        old = torch.empty_like(tensor, device="cpu", requires_grad=False).copy_(tensor)
        self._places.add(place(tensor))
        self.nbytes += old.nbytes
        self._steps.append(lambda: tensor.data.copy_(old))
        return old

    def exchange(self, tensor: torch.Tensor, new: torch.Tensor) -> None:
        """Give `tensor` the bytes of `new`, whose memory then keeps those of `tensor`.

        Both lie on the host, without gaps, and nothing else uses the memory of `new`. As fast as copying
        twice, and without fresh memory, which costs more than the copy.
        """
        live, old = (t.detach().view(-1).view(torch.uint8) for t in (tensor, new))
        scratch = torch.empty(min(_PIECE, live.numel()), dtype=torch.uint8, device="cpu")
        done = 0

        def put_back() -> None:
            live[:done].copy_(old[:done])

        if place(tensor) in self._places:
            tensor.data.copy_(new)
            return
        self._places.add(place(tensor))
        self._steps.append(put_back)
        self.nbytes += new.nbytes
        while done < live.numel():
            here, there = live[done : done + _PIECE], old[done : done + _PIECE]
            size = here.numel()
            kept = scratch[:size].copy_(here)
            try:
                here.copy_(there)
                there.copy_(kept)
            except BaseException:
                here.copy_(kept)
                raise
            done += size  # no call: an interruption in one would lose count

    def keep_value(self, assign: Callable[[Any], None], value: Any) -> None:
        """Keep `value`, which `assign` puts back."""
        self._steps.append(lambda: assign(value))

    def roll_back(self) -> None:
        """Put everything back, the last first.

        Raises:
            ReloadBrokenError: something could not be put back; all the rest was.
        """
        failed: BaseException | None = None
        with torch.no_grad():
            while self._steps:
                step = self._steps.pop()
                try:
                    step()
                except Exception as error:  # noqa: BLE001 - the other steps must be taken too
                    failed = error
        self.forget()
        if failed is not None:
            raise ReloadBrokenError(
                f"The old weights could not be put back ({type(failed).__name__}: {failed}). The "
                "engine holds a mixture of old and new ones: start it anew."
            ) from failed

    def forget(self) -> None:
        """Let go of the old state: it is no longer wanted."""
        self._steps.clear()
        self._places.clear()
        self.nbytes = 0


def require_room(nbytes: int) -> None:
    """Raise `ReloadRoomError` unless the host has memory for an undo log of `nbytes`."""
    if nbytes > _room():
        raise ReloadRoomError(
            f"A reload that can be taken back as a whole keeps up to {_gib(nbytes)} of old weights in "
            f"host memory, of which {_gib(_available())} is left. Nothing was changed.\n"
            "Free some, or set VSS_RELOAD_ATOMIC=layer: then a failed reload leaves whole layers of "
            "either kind, and says which are new."
        )


def _available() -> int:
    return int(psutil.virtual_memory().available)


def _room() -> int:
    return int(_available() * (1 - _SPARE))


def _gib(nbytes: int) -> str:
    return f"{nbytes / 2**30:.2f} GiB"
