"""Compare a live unit with a rebuilt one, leaf by leaf: what must be put back, and what can't be."""

from dataclasses import dataclass, field

import torch

from . import boundaries, plain
from .kernels import same_bits
from .walk import Kind, Leaf


@dataclass
class Difference:
    """How a live unit differs from a rebuilt one.

    tensors: live tensor leaves whose bytes differ but that have the same form there: fill in place.
    added: live tensors with no counterpart, that can be set as an attribute.
    replaced: live tensors of another form than their counterparts, which can be replaced.
    values: live Python values that differ and can be assigned.
    captured: live leaves owned by native code that processing created.
    unfit: for each leaf that can't be put back, why.
    """

    tensors: list[Leaf] = field(default_factory=list)
    added: list[Leaf] = field(default_factory=list)
    replaced: list[Leaf] = field(default_factory=list)
    values: list[Leaf] = field(default_factory=list)
    captured: list[str] = field(default_factory=list)
    unfit: list[str] = field(default_factory=list)

    @property
    def is_empty(self) -> bool:
        """Whether the rebuilt unit already is the live one, as far as Python can see."""
        return not (self.overlay or self.unfit)

    @property
    def overlay(self) -> list[Leaf]:
        """Every live leaf that has to be put back."""
        return self.tensors + self.added + self.replaced + self.values


def compare(
    live: dict[str, Leaf],
    rebuilt: dict[str, Leaf],
    constructed: frozenset[str],
    bytes_matter: bool,
) -> Difference:
    """Compare the leaves of a live unit with those of a rebuilt one.

    `constructed` names the leaves that are opaque in a unit that was never processed: locks, streams
    and the like, which hold no weights. With `bytes_matter` false every tensor of equal form counts
    as different, because it holds placeholders.
    """
    result = Difference()
    for path, leaf in live.items():
        other = rebuilt.get(path)
        if leaf.kind is Kind.OPAQUE:
            if path not in constructed or boundaries.may_hold_weights(leaf.value):
                result.captured.append(path)
        elif other is None:
            _unmatched(leaf, live, result)
        elif leaf.is_tensor:
            _tensor(leaf, other, bytes_matter, result)
        else:
            _value(leaf, other, result)
    for path, leaf in rebuilt.items():
        if path not in live and leaf.kind is not Kind.OPAQUE:
            result.unfit.append(f"{path}: a load creates it, the live model lacks it")
    return result


def same_form(a: torch.Tensor, b: torch.Tensor) -> bool:
    """Whether the elements of `a` can be copied into `b` in place and read alike.

    Strides count only where more than one element lies along the dimension.
    """
    if a.shape != b.shape or a.dtype != b.dtype:
        return False
    sizes = zip(a.shape, a.stride(), b.stride(), strict=True)
    return a.numel() == 0 or all(size == 1 or x == y for size, x, y in sizes)


def place(tensor: torch.Tensor) -> tuple[object, ...]:
    """Equal for two views of the same elements in memory, as long as both are alive."""
    form = (tuple(tensor.shape), tensor.stride(), tensor.dtype)
    return (tensor.device, tensor.data_ptr(), *form)


def describe(tensor: torch.Tensor) -> str:
    """Shape, dtype and, where it says something, stride, for an error message."""
    text = f"{tuple(tensor.shape)} {str(tensor.dtype).removeprefix('torch.')}"
    return text if tensor.is_contiguous() else f"{text} stride {tensor.stride()}"


def _tensor(leaf: Leaf, other: Leaf, bytes_matter: bool, result: Difference) -> None:
    if not other.is_tensor:
        if leaf.attribute and leaf.kind is Kind.ATTRIBUTE and other.assign is not None:
            result.added.append(leaf)
        else:
            result.unfit.append(f"{leaf.path}: a tensor here, not after a load")
    elif not same_form(leaf.value, other.value):
        here, there = describe(leaf.value), describe(other.value)
        if leaf.kind is other.kind and leaf.kind in _OUTSIDE and other.assign is not None:
            result.replaced.append(leaf)
        else:
            result.unfit.append(f"{leaf.path}: {here} here, {there} after a load")
    elif leaf.kind is not other.kind:
        result.unfit.append(f"{leaf.path}: a {leaf.kind} here, a {other.kind} after a load")
    elif other.value.is_meta or not bytes_matter or not same_bits(leaf.value, other.value):
        if _is_address_tensor(leaf.value):
            result.captured.append(leaf.path)
        elif repeats_elements(other.value):
            result.unfit.append(f"{leaf.path}: an expanded tensor, which can't be filled in place")
        else:
            result.tensors.append(leaf)


def _value(leaf: Leaf, other: Leaf, result: Difference) -> None:
    if not other.is_tensor and plain.equal(leaf.value, other.value):
        return
    if other.kind is Kind.OPAQUE or (other.is_tensor and leaf.value is not None):
        result.unfit.append(
            f"{leaf.path}: {leaf.value!r} here, another kind of object after a load"
        )
    elif not plain.is_restorable(leaf.value):
        result.unfit.append(f"{leaf.path}: a {type(leaf.value).__name__} that can't be written")
    elif plain.is_address_like(leaf.value):
        result.captured.append(leaf.path)
    elif other.assign is None:
        result.unfit.append(f"{leaf.path}: {leaf.value!r} lies where it can't be replaced")
    else:
        result.values.append(leaf)


def repeats_elements(tensor: torch.Tensor) -> bool:
    """Whether several elements lie at one place in memory."""
    return any(n > 1 and step == 0 for n, step in zip(tensor.shape, tensor.stride(), strict=True))


def _is_address_tensor(tensor: torch.Tensor) -> bool:
    """Whether a tensor holds nothing but numbers that could be addresses."""
    if tensor.dtype not in (torch.int64, torch.uint64) or not 0 < tensor.numel() <= 8:
        return False
    return all(plain.is_address_like(item) for item in tensor.detach().view(-1).tolist())


#: Tensors that no loader fills; some are cast when the model first runs, as rotary caches are.
_OUTSIDE = (Kind.ATTRIBUTE, Kind.TRANSIENT)

#: Said of containers, whose content is judged leaf by leaf.
CONTAINERS = tuple(f"builtins.{name}" for name in ("dict", "list", "set", "tuple"))


def _unmatched(leaf: Leaf, live: dict[str, Leaf], result: Difference) -> None:
    """A live leaf that a load does not create; a plain attribute of the module can be added."""
    if leaf.kind is Kind.VALUE and (leaf.value is None or leaf.value in CONTAINERS):
        return  # nothing, or a container whose content is judged leaf by leaf
    holder = live.get(leaf.path.removesuffix(".<class>"))
    if holder is not leaf and holder is not None and holder.is_tensor:
        return  # the class of a tensor, which is judged itself
    if leaf.kind in (Kind.ATTRIBUTE, Kind.VALUE) and leaf.attribute is not None:
        if leaf.kind is Kind.ATTRIBUTE:
            result.added.append(leaf)
        elif plain.is_restorable(leaf.value) and not plain.is_address_like(leaf.value):
            result.values.append(leaf)
        else:
            result.unfit.append(f"{leaf.path}: a {type(leaf.value).__name__} that can't be written")
    else:
        result.unfit.append(f"{leaf.path}: the live model has it, a load does not create it")
