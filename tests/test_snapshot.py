"""The snapshot itself: what it sees, that two cold loads agree, that a single element matters."""

import functools
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from torch import nn

from tests.support.batch import run_batch
from tests.support.lab import Zoo, explain, without_ours
from tests.support.snapshot import differences, snapshot
from tests.zoo.kinds import PACKED, TENSORS


@dataclass
class _Data:
    tensor: torch.Tensor
    count: int = 3
    more: dict[str, Any] = field(default_factory=dict)


class _Helper:
    __slots__ = ("held",)

    def __init__(self, held: torch.Tensor) -> None:
        self.held = held


class _Holder(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        ones = [torch.full((2,), float(value)) for value in range(9)]
        self.weight = nn.Parameter(ones[0])
        self.register_buffer("scale", ones[1], persistent=False)
        self.plain = ones[2]
        self.in_list = [None, (ones[3],)]
        self.in_data = _Data(ones[4], more={"deep": _Helper(ones[5])})
        captured = ones[6]
        self.closure = lambda x: x + captured
        self.part = functools.partial(torch.add, ones[7], alpha=ones[8])
        self.scale_float = 0.25
        self.kv_cache = torch.zeros(1)


def _with(change: Any) -> dict[str, Any]:
    model = nn.Sequential(_Holder())
    change(model[0])
    return snapshot(model, kernels=False)


def test_it_sees_tensors_wherever_they_hide() -> None:
    seen = _with(lambda _: None)
    assert set(seen["tensors"]) == {
        "0.weight",
        "0.scale",
        "0.plain",
        "0.in_list[1][0]",
        "0.in_data.tensor",
        "0.in_data.more['deep'].held",
        "0.closure<cell captured>",
        "0.part<0>",
        "0.part<alpha>",
    }
    assert seen["numbers"]["0.scale_float"] == (0.25).hex()
    assert seen["numbers"]["0.in_data.count"] == 3


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (lambda m: m.plain.add_(1), "0.plain"),
        (lambda m: m.in_data.more["deep"].held.add_(1), "held"),
        (lambda m: setattr(m, "scale_float", 0.5), "scale_float"),
        (lambda m: setattr(m, "plain", m.plain.half()), "0.plain"),
        (lambda m: setattr(m, "plain", m.plain.view(1, 2)), "0.plain"),
        (lambda m: delattr(m, "plain"), "0.plain is gone"),
        (lambda m: setattr(m, "extra", torch.zeros(1)), "0.extra is new"),
        (lambda m: setattr(m, "plain", m.in_data.tensor), "share bytes"),
    ],
)
def test_a_change_is_a_difference(change: Any, said: str) -> None:
    found = differences(_with(change), _with(lambda _: None))
    assert any(said in line for line in found), found


def test_equal_models_show_no_difference() -> None:
    assert differences(_with(lambda _: None), _with(lambda _: None)) == []


@pytest.mark.engine
@pytest.mark.parametrize("way", [PACKED, TENSORS])
def test_two_processes_agree(zoo: Zoo, way: str) -> None:
    kinds = ["llama-kv-head", "mixtral", "llama-lora", "llama-w4a16"]
    first, second = (
        run_batch([zoo.job(kind) for kind in kinds], way, without_ours(way)) for _ in range(2)
    )
    for kind in kinds:
        assert first[kind]["error"] is None, explain(first[kind])
        assert differences(first[kind]["snapshot"], second[kind]["snapshot"]) == []


@pytest.mark.engine
@pytest.mark.parametrize(
    "kind", [pytest.param("llama-kv-head", marks=pytest.mark.full), "llama-w8a8-kv"]
)
def test_changing_any_one_tensor_of_a_checkpoint_shows(zoo: Zoo, kind: str, tmp_path: Any) -> None:
    """Packed: most weights can only be seen through their kernels."""
    jobs = [zoo.job(kind)]
    for source in sorted(zoo.path(kind).glob("*.safetensors")):
        with safe_open(source, framework="pt") as file:
            names = [name for name in file.keys() if not name.endswith("zero_point")]  # noqa: SIM118
        for name in names:
            changed = tmp_path / name
            changed.mkdir()
            for path in zoo.path(kind).iterdir():
                (changed / path.name).symlink_to(path)
            (changed / source.name).unlink()
            tensors = load_file(source)
            flat = tensors[name].reshape(-1).clone()
            flat[0] = flat[0] + 1
            tensors[name] = flat.view(tensors[name].shape)
            save_file(tensors, changed / source.name, metadata={"format": "pt"})
            jobs.append(zoo.job(kind, id=name, model=str(changed)))
    results = run_batch(jobs, PACKED, without_ours(PACKED))
    reference = results.pop(kind)["snapshot"]
    assert len(results) > 20
    for name, result in results.items():
        assert result["error"] is None, explain(result)
        assert differences(result["snapshot"], reference), f"changing {name} shows nowhere"
