"""Tensors that a load does not create: their strides come back, and the memory that they shared."""

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from tests.support.batch import Job, run_batch
from tests.support.lab import WITH_OURS, Zoo, explain
from tests.support.snapshot import differences
from tests.zoo.kinds import PACKED, TENSORS
from vllm_sharded_state.checkpoint.manifest import TensorEntry
from vllm_sharded_state.errors import NotRepresentableError, RestoreError
from vllm_sharded_state.remake import remake
from vllm_sharded_state.state import sharing, units
from vllm_sharded_state.state.walk import Leaf

CPU = torch.device("cpu")
BASE = torch.arange(24.0).view(4, 6)


@pytest.mark.parametrize(
    "tensor",
    [
        BASE.t(),
        BASE[:, ::2],
        BASE[1:3, 2:5],
        BASE.t()[1::2],
        BASE[:1].expand(4, 6),
        BASE[:, :1].expand(4, 6).t(),
        BASE.view(2, 2, 6).permute(2, 0, 1),
        torch.tensor(3.0),
        torch.empty(0, 4).t(),
        torch.tensor([1, 2], dtype=torch.int8),
        BASE.to(torch.float8_e4m3fn).t(),
    ],
    ids=str,
)
def test_strides_come_back(tensor: torch.Tensor) -> None:
    made = sharing.restored(tensor.contiguous(), sharing.stride(tensor), CPU)
    assert made.shape == tensor.shape
    assert made.dtype == tensor.dtype
    assert made.stride() == tensor.stride() or tensor.is_contiguous()
    assert torch.equal(made.double(), tensor.double())
    assert made.numel() == 0 or made.data_ptr() != tensor.data_ptr()


def _leaves(**tensors: torch.Tensor) -> dict[str, Leaf]:
    return units.leaves(units.Unit("m", {"m": _module(**tensors)}, False), set())


def _module(**tensors: torch.Tensor) -> nn.Module:
    module = nn.Module()
    for name, tensor in tensors.items():
        setattr(module, name, tensor)
    return module


def _arranged(free: set[str], **tensors: torch.Tensor) -> dict[str, tuple[str, int] | None]:
    leaves = _leaves(**tensors)
    found = sharing.arrange([leaves[f"m.{name}"] for name in free], leaves.values())
    return {leaf.attribute or "": view and (view.base, view.offset) for leaf, view in found}


def test_a_view_lies_in_what_a_load_creates() -> None:
    base = nn.Parameter(BASE.clone(), requires_grad=False)
    made = _arranged(
        {"t", "row", "own", "same"},
        w=base,
        t=base.t(),
        row=base[2],
        own=BASE.clone(),
        same=base.data,
    )
    assert made == {"t": ("m.w", 0), "row": ("m.w", 48), "own": None, "same": ("m.w", 0)}


def test_tensors_without_a_storage_are_passed_over() -> None:
    """Sparse ones are native code's; whether they can be saved is decided elsewhere."""
    made = _arranged({"own"}, own=BASE.clone(), sparse=BASE.to_sparse())
    assert made == {"own": None}


def test_the_largest_comes_first_and_others_lie_in_it() -> None:
    base = BASE.clone()
    made = _arranged({"a", "b", "c"}, a=base[1, 2:4], b=base, c=base)
    assert list(made) == ["b", "c", "a"]
    assert made == {"b": None, "c": ("m.b", 0), "a": ("m.b", 32)}


def test_columns_that_lie_between_each_other_share_nothing() -> None:
    base = BASE.clone()
    made = _arranged({"even", "odd"}, even=base[:, ::2], odd=base[:, 1::2])
    assert made == {"even": None, "odd": None}


@pytest.mark.parametrize(
    ("tensors", "said"),
    [
        ({"a": BASE.view(-1)[:10], "b": BASE.view(-1)[5:20]}, "m.a: shares a part .* with m.b"),
        ({"a": BASE.view(-1).unfold(0, 6, 2)}, "m.a: several of its elements"),
        ({"a": BASE[:, :4], "b": BASE[1:, 3:]}, "shares a part"),
    ],
    ids=["overlap", "windows", "columns"],
)
def test_what_can_not_come_back_is_named(tensors: dict[str, torch.Tensor], said: str) -> None:
    with pytest.raises(NotRepresentableError, match=said):
        _arranged(set(tensors), **tensors)


def test_a_free_tensor_around_one_that_a_load_creates_is_named() -> None:
    with pytest.raises(
        NotRepresentableError, match=r"m\.all: shares a part of its memory with m\.w"
    ):
        _arranged({"all"}, all=BASE, w=nn.Parameter(BASE[1:2], requires_grad=False))


def _entry(tensor: torch.Tensor, **more: Any) -> TensorEntry:
    entry = TensorEntry("f", "k", "attribute", "F32", list(tensor.shape), "runtime", "", **more)
    entry.stride = sharing.stride(tensor)
    return entry


def test_a_load_that_has_other_values_there_is_refused() -> None:
    module = _module(w=nn.Parameter(BASE + 1, requires_grad=False))
    leaves = units.leaves(units.Unit("m", {"m": module}, False), set())
    entries = {"m.t": _entry(BASE.t(), owner="m", base="m.w")}
    with pytest.raises(RestoreError, match=r"m\.t lay in the memory of m\.w, which holds other"):
        remake(entries, lambda _: BASE.t(), leaves, {"m": module}, CPU)


@pytest.mark.parametrize(
    ("more", "said"),
    [
        ({"base": "m.gone"}, "no tensor m.gone"),
        ({"base": "m.w", "offset": 2}, "no whole number"),
        ({"base": "m.w", "offset": 4}, "behind the memory"),
        ({"base": "m.w", "offset": -4}, "can't be made"),
        ({"stride": [1, -6]}, "can't be made"),
        ({"stride": [1]}, "can't be made"),
        ({"stride": [1 << 60, 1]}, "can't be made"),
    ],
    ids=str,
)
def test_places_that_do_not_exist_are_refused(more: dict[str, Any], said: str) -> None:
    module = _module(w=nn.Parameter(BASE.clone(), requires_grad=False))
    leaves = units.leaves(units.Unit("m", {"m": module}, False), set())
    entry = _entry(BASE, owner="m")
    for name, value in more.items():
        setattr(entry, name, value)
    with pytest.raises(RestoreError, match=said):
        remake({"m.t": entry}, lambda _: BASE, leaves, {"m": module}, CPU)
    assert not hasattr(module, "t")


def test_views_of_views_are_made_whatever_their_order() -> None:
    """A manifest lists entries by name, not as they depend on each other."""
    module = _module(w=nn.Parameter(BASE.clone(), requires_grad=False))
    leaves = units.leaves(units.Unit("m", {"m": module}, False), set())
    entries = {
        "m.a": _entry(BASE[1], owner="m", base="m.b", offset=24),
        "m.b": _entry(BASE, owner="m", base="m.c"),
        "m.c": _entry(BASE, owner="m"),
    }
    values = {"m.a": BASE[1], "m.b": BASE, "m.c": BASE}
    remake(entries, values.__getitem__, leaves, {"m": module}, CPU)
    module.c.fill_(3)
    assert module.a.tolist() == [3.0] * 6
    assert torch.equal(module.b, module.c)
    assert torch.equal(module.w, BASE)


def test_views_that_lie_in_each_other_are_refused() -> None:
    entries = {
        "m.a": _entry(BASE, owner="m", base="m.b"),
        "m.b": _entry(BASE, owner="m", base="m.a"),
    }
    with pytest.raises(RestoreError, match=r"m\.a\n  m\.b"):
        remake(entries, lambda _: BASE, {}, {"m": nn.Module()}, CPU)


@pytest.mark.engine
@pytest.mark.parametrize(("way", "layout"), [(PACKED, "auto"), (TENSORS, "runtime")])
def test_a_model_with_views_comes_back(way: str, layout: str, zoo: Zoo, tmp_path: Path) -> None:
    """Views kept by a first run: what they are is said by the model that loaded, before and after."""
    job = zoo.job("llama", id="save", mutate="keep_views", save=str(tmp_path / "s"), layout=layout)
    saving = run_batch([job], way, WITH_OURS)["save"]
    assert saving["error"] is None, explain(saving)
    saved = {"model": str(tmp_path / "s"), "engine": {"load_format": "sharded_state"}}
    loads = run_batch(
        [Job("look", **saved), Job("change", mutate="change_viewed", **saved)], way, WITH_OURS
    )
    for load in loads.values():
        assert load["error"] is None, explain(load)
    assert differences(loads["look"]["snapshot"], saving["snapshot"]) == []
