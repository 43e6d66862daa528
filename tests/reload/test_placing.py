"""A unit's tensors are written all or none, and those that share memory agree."""

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from vllm_sharded_state.errors import ReloadInPlaceError
from vllm_sharded_state.reload.placing import Placing
from vllm_sharded_state.reload.undo import UndoLog
from vllm_sharded_state.state.walk import Kind, Leaf


def leaf(path: str, tensor: torch.Tensor) -> Leaf:
    return Leaf(path, Kind.PARAMETER, tensor, None, "")


class Interrupted(TorchDispatchMode):
    """Raises at copy number `left`, counted from the first, and at no later one."""

    def __init__(self, left: int) -> None:
        super().__init__()
        self.left = left

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):  # type: ignore[no-untyped-def]
        if func is torch.ops.aten.copy_.default:
            self.left -= 1
            if self.left == 0:
                raise KeyboardInterrupt
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("number", [1, 2, 3])
def test_without_undo_an_interruption_waits_until_the_unit_is_whole(number: int) -> None:
    live = [torch.zeros(4) for _ in range(3)]
    new = [torch.full((4,), float(n)) for n in range(1, 4)]
    placing = Placing("unit", [(leaf(str(n), t), new[n]) for n, t in enumerate(live)])
    undo = UndoLog()
    with pytest.raises(KeyboardInterrupt), Interrupted(number):
        placing.apply(undo, {}, keep=False)
    assert all(torch.equal(a, b) for a, b in zip(live, new, strict=True))
    assert undo.nbytes == 0


@pytest.mark.parametrize("keep", [True, False])
def test_tensors_that_are_one_take_one_content(keep: bool) -> None:
    first, shared = torch.zeros(2), torch.zeros(4)
    written = {}
    placing = Placing(
        "unit",
        [
            (leaf("first", first), torch.ones(2)),
            (leaf("a", shared), torch.ones(4)),
            (leaf("b", shared), torch.ones(4)),
        ],
    )
    assert placing.apply(UndoLog(), written, keep)
    assert torch.equal(shared, torch.ones(4))
    # Another unit that has the same tensor: it changed in this reload, though nothing is left to do.
    assert Placing("other", [(leaf("c", shared), torch.ones(4))]).apply(UndoLog(), written, keep)


@pytest.mark.parametrize("keep", [True, False])
def test_contents_that_differ_are_refused_before_anything_is_written(keep: bool) -> None:
    first, shared = torch.zeros(2), torch.zeros(4)
    placing = Placing(
        "unit",
        [
            (leaf("first", first), torch.ones(2)),
            (leaf("a", shared), torch.ones(4)),
            (leaf("b", shared), torch.zeros(4)),
        ],
    )
    with pytest.raises(ReloadInPlaceError, match="a and b are one tensor"):
        placing.apply(UndoLog(), {}, keep)
    assert not first.any()
    assert not shared.any()


def test_what_is_equal_is_neither_written_nor_kept() -> None:
    live, undo = torch.ones(3), UndoLog()
    version = live._version
    assert not Placing("unit", [(leaf("a", live), torch.ones(3))]).apply(undo, {})
    assert (live._version, undo.nbytes) == (version, 0)
