"""Buffers between a file and a device: used again only when nothing reads them any more."""

import threading
from collections.abc import Sequence
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from vllm_sharded_state.checkpoint import device, jobs, memory, plan, pool
from vllm_sharded_state.checkpoint.checksum import checksum
from vllm_sharded_state.checkpoint.reading import PartReader, Request
from vllm_sharded_state.errors import IncompleteError

Pairs = Sequence[tuple[torch.Tensor, torch.Tensor]]


class LateTransport:
    """A stand-in for a CUDA stream, which this machine lacks: copies happen as late as they may.

    That is when their buffer is waited for, or at the end; so a buffer that is filled again too early,
    or a read that ends before its copies, gives wrong bytes.
    """

    def __init__(self) -> None:
        self.made = 0
        self.most = 0
        self._lock = threading.Lock()
        self._begun: list[Pairs] = []

    def buffer(self, size: int) -> torch.Tensor:
        with self._lock:
            self.made += 1
        return torch.full((size,), 0xEE, dtype=torch.uint8)

    def copy(self, pairs: Pairs) -> int:
        with self._lock:
            self._begun.append(pairs)
            self.most = max(self.most, sum(1 for begun in self._begun if begun))
            return len(self._begun) - 1

    def wait(self, copies: int) -> None:
        with self._lock:  # a stream does what was begun before, too
            for index in range(copies + 1):
                self._run(index)

    def finish(self) -> None:
        self.wait(len(self._begun) - 1)

    def _run(self, index: int) -> None:
        for target, source in self._begun[index]:
            target.copy_(source)
        self._begun[index] = ()


@pytest.fixture
def late(monkeypatch: pytest.MonkeyPatch) -> LateTransport:
    """All tensors are as if they lay on a device, and buffers are small."""
    transport = LateTransport()
    monkeypatch.setattr(device, "transport", lambda where: transport)
    monkeypatch.setattr(plan, "_way", lambda tensor: tensor.device)
    monkeypatch.setattr(plan, "Ring", lambda way: device.Ring(way, 256))
    monkeypatch.setattr(plan, "PIECE", 256)
    monkeypatch.setattr(jobs, "PIECE", 100)
    return transport


def _tensors() -> dict[str, torch.Tensor]:
    sizes = {f"{index}": index % 7 + 1 for index in range(100)} | {"large": 1003, "larger": 2001}
    tensors = {key: torch.arange(size) * 31 + len(key) for key, size in sizes.items()}
    return tensors | {"odd": torch.arange(13, dtype=torch.uint8), "matrix": torch.randn(40, 30)}


def _checksum(tensor: torch.Tensor) -> str:
    return checksum(tensor.view(-1).view(torch.uint8).numpy().tobytes())


@pytest.mark.parametrize("threads", [1, 3])
@pytest.mark.parametrize("strided", [False, True])
def test_every_byte_arrives_through_buffers_that_are_used_again(
    tmp_path: Path,
    late: LateTransport,
    threads: int,
    strided: bool,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(pool, "threads", lambda: threads)
    tensors = _tensors()
    save_file(tensors, tmp_path / "a.safetensors")
    places = {
        key: torch.zeros(*t.shape, 2 if strided else 1, dtype=t.dtype)[..., 0]
        for key, t in tensors.items()
    }
    reader = PartReader(tmp_path, {"a.safetensors": None})
    reader.fill(
        [Request("a.safetensors", key, _checksum(t), places[key]) for key, t in tensors.items()]
    )
    for key, tensor in tensors.items():
        assert torch.equal(places[key], tensor), key
    assert late.most > 1, "nothing overlapped, so nothing was tested"
    assert late.made <= 3 * threads


def test_damage_is_found_before_it_reaches_anyone(tmp_path: Path, late: LateTransport) -> None:
    tensors = _tensors()
    save_file(tensors, tmp_path / "a.safetensors")
    reader = PartReader(tmp_path, {"a.safetensors": None})
    wrong = {"7", "large", "matrix"}
    requests = [
        Request("a.safetensors", key, _checksum(t + (key in wrong)), torch.zeros_like(t))
        for key, t in tensors.items()
    ]
    with pytest.raises(IncompleteError, match=r"^3 tensors") as caught:
        reader.fill(requests)
    assert {line.split()[0] for line in str(caught.value).splitlines()[1:-1]} == wrong


def test_after_a_failure_no_copy_is_left_under_way(
    tmp_path: Path, late: LateTransport, monkeypatch: pytest.MonkeyPatch
) -> None:
    tensors = _tensors()
    save_file(tensors, tmp_path / "a.safetensors")
    reader = PartReader(tmp_path, {"a.safetensors": None})
    with open(tmp_path / "a.safetensors", "r+b") as file:
        file.truncate((tmp_path / "a.safetensors").stat().st_size - 1)
    with pytest.raises(IncompleteError, match="cut off while it was read"):
        reader.fill(
            [Request("a.safetensors", key, None, torch.zeros_like(t)) for key, t in tensors.items()]
        )
    assert not any(late._begun)


@pytest.mark.parametrize("limit", [8, 24, 100, 10_000])
@pytest.mark.parametrize(
    "tensor",
    [
        torch.arange(7 * 5 * 3).view(7, 5, 3),
        torch.arange(7 * 5 * 3).view(7, 5, 3).permute(2, 0, 1),
        torch.arange(12)[::3],
        torch.tensor(5),
        torch.arange(6).expand(4, 6),
    ],
)
def test_slabs_are_small_and_follow_each_other(tensor: torch.Tensor, limit: int) -> None:
    found = list(memory.slabs(tensor, limit))
    assert all(slab.nbytes <= limit for slab in found)
    assert [x for slab in found for x in slab.flatten().tolist()] == tensor.flatten().tolist()


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_on_cuda(tmp_path: Path) -> None:
    tensors = {f"{i}": torch.randn(i % 50 + 1, 64) for i in range(2000)}
    tensors |= {"large": torch.randn(5000, 4000), "turned": torch.randn(3000, 2000)}
    save_file(tensors, tmp_path / "a.safetensors")
    reader = PartReader(tmp_path, {"a.safetensors": None})
    places = {key: torch.full_like(t, 7.0, device="cuda") for key, t in tensors.items()}
    places["turned"] = torch.zeros(2000, 3000, device="cuda").t()
    addresses = {key: t.data_ptr() for key, t in places.items()}
    reader.fill(
        [Request("a.safetensors", key, _checksum(t), places[key]) for key, t in tensors.items()]
    )
    for key, tensor in tensors.items():
        assert torch.equal(places[key].cpu(), tensor), key
        assert places[key].data_ptr() == addresses[key]
