"""Put a unit that was built anew in the place of the live one, without moving a single tensor.

The live unit keeps its modules, tensors and containers, so whatever else holds them (captured graphs,
closures, other modules) sees the new state: bytes are copied in place; Python values and native handles
that processing made are assigned where the old ones were.
"""

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch

from vllm_sharded_state.errors import ReloadInPlaceError, listed
from vllm_sharded_state.state import boundaries, plain
from vllm_sharded_state.state.compare import describe, place, repeats_elements, same_form
from vllm_sharded_state.state.kernels import same_bits
from vllm_sharded_state.state.walk import Kind, Leaf

from .undo import UndoLog

#: By the place of each tensor that was sent: the path under which it came first, and if it changed.
Written = dict[tuple[object, ...], tuple[str, bool]]
#: A live leaf, what assigns it, and the new value.
Assignment = tuple[Leaf, Callable[[Any], None], Any]


@dataclass
class Before:
    """What a unit that is being built held after it was filled, before it was processed.

    tensors: copies of the tensors that are no parameters. values, handles: the rest, as it was.
    """

    tensors: dict[str, torch.Tensor] = field(default_factory=dict)
    values: dict[str, Any] = field(default_factory=dict)
    handles: dict[str, Any] = field(default_factory=dict)

    @classmethod
    def of(cls, leaves: Mapping[str, Leaf], loaded: frozenset[str]) -> "Before":
        """Take down `leaves`; those in `loaded` came with the new weights, whatever they are."""
        before = cls()
        for path, leaf in leaves.items():
            if leaf.kind is Kind.OPAQUE:
                before.handles[path] = leaf.value
            elif not leaf.is_tensor:
                before.values[path] = leaf.value
            elif leaf.kind is not Kind.PARAMETER and path not in loaded and not leaf.value.is_meta:
                before.tensors[path] = leaf.value.detach().clone()
        return before


@dataclass
class Placing:
    """Every change that makes a live unit the one that was built: decided first, then made."""

    unit: str
    copies: list[tuple[Leaf, torch.Tensor]] = field(default_factory=list)
    assignments: list[Assignment] = field(default_factory=list)
    unfit: list[str] = field(default_factory=list)

    def refuse_unfit(self) -> None:
        """Raise `ReloadInPlaceError` when something can't be put where the old state lies."""
        if self.unfit:
            raise ReloadInPlaceError(
                f"{self.unit} can't take new weights where its old ones lie:\n{listed(self.unfit)}\n"
                "Start the engine anew from a checkpoint that holds the new weights."
            )

    def apply(self, undo: UndoLog, written: Written, keep: bool = True) -> bool:
        """Make the changes, keeping in `undo` what they overwrite; return whether anything is new.

        A tensor that is equal to the live one is not copied: told apart at the first difference, that
        costs nothing where they differ. What native code holds counts as new. Without `keep`, old
        tensors are not kept where there are only tensors to be written: then an interruption ends with
        all of them written.

        `written` is what this reload wrote so far: a tensor that two units share takes one content only.
        Raises `ReloadInPlaceError` for another one, before anything is changed.
        """
        self.refuse_unfit()
        different, changed = self._different(written)
        with torch.no_grad():
            if keep or self.assignments:
                for live, new in different:
                    if self._may_exchange(live, new):
                        undo.exchange(live, new)
                    else:
                        undo.keep_tensor(live)
                        live.data.copy_(new)
            else:
                _copy_all(different)
        assign_all(self.assignments, undo)
        return changed or bool(self.assignments)

    def _different(self, written: Written) -> tuple[list[tuple[torch.Tensor, torch.Tensor]], bool]:
        """The live tensors that have to be written, with what; and whether any is new in this reload."""
        pending: dict[tuple[object, ...], tuple[torch.Tensor, torch.Tensor]] = {}
        changed = False
        for leaf, tensor in self.copies:
            key = place(leaf.value)
            _, there = pending.get(key, (None, leaf.value))
            equal = same_bits(there, tensor)
            first, renewed = written.setdefault(key, (leaf.path, not equal))
            if first != leaf.path and not equal:
                raise ReloadInPlaceError(
                    f"{first} and {leaf.path} are one tensor in the running model, and were sent with "
                    "different contents.\nSend one content for both, or start the engine anew from a "
                    "checkpoint in which they differ."
                )
            changed |= renewed
            if not equal:
                pending[key] = (leaf.value, tensor)
        return list(pending.values()), changed

    def _may_exchange(self, live: torch.Tensor, new: torch.Tensor) -> bool:
        """Whether the memory of `new`, which lies beside the model, can take the old bytes.

        Not where a native handle may read it, nor where several tensors share it.
        """
        if self.assignments or live.device.type != "cpu" or new.device.type != "cpu":
            return False
        storage = new.untyped_storage()
        users = sum(t.untyped_storage()._cdata == storage._cdata for _, t in self.copies)
        whole = storage.nbytes() == new.nbytes and users == 1
        return whole and live.is_contiguous() and new.is_contiguous()


def _copy_all(pairs: list[tuple[torch.Tensor, torch.Tensor]]) -> None:
    """Copy each second tensor to the first; an interruption waits until all are."""
    try:
        for live, new in pairs:
            live.data.copy_(new)
    except BaseException:
        for live, new in pairs:
            live.data.copy_(new)
        raise


def assign_all(assignments: Iterable[Assignment], undo: UndoLog) -> None:
    """Assign, keeping in `undo` what was there."""
    for leaf, assign, value in assignments:
        undo.keep_value(assign, leaf.value)
        assign(value)


def plan(
    unit: str,
    live: Mapping[str, Leaf],
    built: Mapping[str, Leaf],
    before: Before,
    is_attention: bool = False,
) -> Placing:
    """What has to change in `live` to make it `built`: both the leaves of one unit, by path.

    What the unit held before it was processed, and holds still, is the constructor's and stays. In an
    attention layer the engine keeps state of its own, which is left alone where processing did not make
    another.
    """
    placing = Placing(unit)
    for path, leaf in built.items():
        old = live.get(path)
        if leaf.kind is Kind.OPAQUE:
            _handle(path, leaf, old, before, placing)
        elif leaf.is_tensor:
            _tensor(path, leaf.value, old, before, placing)
        else:
            _value(path, leaf, old, before, placing, is_attention)
    for path, leaf in live.items():
        if path not in built and not is_attention:
            _left_over(path, leaf, live, placing)
    return placing


def _tensor(
    path: str, tensor: torch.Tensor, old: Leaf | None, before: Before, placing: Placing
) -> None:
    kept = before.tensors.get(path)
    if kept is not None and same_form(kept, tensor) and same_bits(kept, tensor):
        return
    if tensor.is_meta:
        return  # another unit's, or nothing that this one computes
    if old is None or not old.is_tensor:
        placing.unfit.append(f"{path}: new weights make a tensor that the running model lacks")
    elif not same_form(old.value, tensor):
        here, there = describe(old.value), describe(tensor)
        placing.unfit.append(f"{path}: {here} in the running model, {there} with the new weights")
    elif repeats_elements(tensor):
        placing.unfit.append(f"{path}: an expanded tensor, which can't be filled in place")
    elif _holds_addresses(tensor) and not same_bits(old.value, tensor):
        placing.unfit.append(f"{path}: it holds addresses")
    elif tensor.numel():
        placing.copies.append((old, tensor))


def _handle(path: str, leaf: Leaf, old: Leaf | None, before: Before, placing: Placing) -> None:
    if path in before.handles and (
        before.handles[path] is leaf.value or not boundaries.may_hold_weights(leaf.value)
    ):
        return  # a lock, a stream: a constructor's
    if old is None or old.assign is None:
        placing.unfit.append(f"{path}: memory that native code owns, where nothing can replace it")
    else:
        placing.assignments.append((old, old.assign, leaf.value))


def _value(
    path: str,
    leaf: Leaf,
    old: Leaf | None,
    before: Before,
    placing: Placing,
    is_attention: bool,
) -> None:
    if old is not None and not old.is_tensor and plain.equal(old.value, leaf.value):
        return
    made = path not in before.values or not plain.equal(before.values[path], leaf.value)
    if not made and is_attention:
        return
    if old is None:
        if leaf.value is not None and not _describes(path):
            placing.unfit.append(f"{path}: new weights set it, the running model lacks it")
    elif not plain.is_restorable(leaf.value) or old.assign is None or old.is_tensor:
        placing.unfit.append(f"{path}: {_short(old)} in the running model, {_short(leaf)} after")
    elif plain.is_address_like(leaf.value):
        placing.unfit.append(f"{path}: it may be an address")
    elif not made:
        placing.unfit.append(
            f"{path}: {_short(old)} in the running model, {_short(leaf)} when built"
        )
    else:
        placing.assignments.append((old, old.assign, leaf.value))


def _left_over(path: str, leaf: Leaf, live: Mapping[str, Leaf], placing: Placing) -> None:
    """A leaf of the live unit that building it anew does not give: it may be made of old weights."""
    if leaf.kind is Kind.VALUE and (leaf.value is None or _describes(path)):
        return
    if leaf.is_tensor and leaf.value.numel() == 0:
        return
    placing.unfit.append(f"{path}: in the running model, and nothing tells how to renew it")


def _describes(path: str) -> bool:
    """Whether the leaf names the class or function of what is judged leaf by leaf itself."""
    return path.endswith((".<class>", ".<function>"))


def _holds_addresses(tensor: torch.Tensor) -> bool:
    if tensor.dtype not in (torch.int64, torch.uint64) or not 0 < tensor.numel() <= 8:
        return False
    return all(plain.is_address_like(item) for item in tensor.detach().view(-1).tolist())


def _short(leaf: Leaf) -> str:
    return "a tensor" if leaf.is_tensor else repr(leaf.value)[:60]
