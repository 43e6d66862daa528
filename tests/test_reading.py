"""Bulk reads against the safetensors library: each dtype, kind of place and split of the work."""

import threading
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from vllm_sharded_state.checkpoint import jobs, plan, pool, reading
from vllm_sharded_state.checkpoint.checksum import checksum
from vllm_sharded_state.checkpoint.dtypes import NAMES, torch_dtype
from vllm_sharded_state.checkpoint.reading import PartReader, Request
from vllm_sharded_state.errors import IncompleteError, TensorMismatchError


def _bytes(tensor: torch.Tensor) -> bytes:
    whole = tensor.clone(memory_format=torch.contiguous_format)
    return whole.view(-1).view(torch.uint8).numpy().tobytes()


def _random(*shape: int, dtype: torch.dtype = torch.float32, seed: int = 0) -> torch.Tensor:
    count = torch.Size(shape).numel() * dtype.itemsize
    generator = torch.Generator().manual_seed(seed + count)
    raw = torch.randint(0, 256, (count,), dtype=torch.uint8, generator=generator)
    if dtype == torch.bool:
        raw %= 2
    return raw.view(dtype).view(shape)


def _request(file: str, key: str, saved: torch.Tensor, tensor: torch.Tensor) -> Request:
    return Request(file, key, checksum(_bytes(saved)), tensor)


@pytest.fixture(params=[1, 2, 5])
def threads(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> int:
    monkeypatch.setattr(pool, "threads", lambda: request.param)
    return request.param


@pytest.fixture
def small_pieces(monkeypatch: pytest.MonkeyPatch) -> None:
    """Work split as finely as that of large tensors, for small ones."""
    for module, name, size in (
        (jobs, "PIECE", 64),
        (plan, "PIECE", 64),
        (reading, "PIECE", 0),
        (jobs, "SEGMENT", 192),
        (plan, "MAX_BUFFERS", 3),
    ):
        monkeypatch.setattr(module, name, size)


def _parts(directory: Path) -> dict[str, dict[str, torch.Tensor]]:
    """Two files with every dtype, an empty tensor, a scalar, many small ones and larger ones."""
    first = {
        name: _random(3, 5, dtype=torch_dtype(name), seed=index) for index, name in enumerate(NAMES)
    }
    first |= {"scalar": torch.tensor(0.0123), "empty": torch.empty(0, 4), "": torch.arange(7)}
    second = {f"small {index}": _random(index % 9 + 1, seed=index) for index in range(300)}
    second |= {"large": _random(70, 33), "bytes": _random(4097, dtype=torch.uint8)}
    parts = {"a.safetensors": first, "b.safetensors": second}
    for name, tensors in parts.items():
        save_file(tensors, directory / name)
    return parts


PLACES: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "contiguous": lambda t: (
        torch.full_like(t.view(torch.uint8), 7).view(t.dtype) if t.dim() else torch.zeros_like(t)
    ),
    "transposed": lambda t: torch.empty(tuple(reversed(t.shape)), dtype=t.dtype).permute(
        tuple(reversed(range(t.dim())))
    ),
    "every second": lambda t: torch.empty((*t.shape, 2), dtype=t.dtype)[..., 1],
    "a parameter": lambda t: torch.nn.Parameter(
        torch.empty_like(t), requires_grad=t.dtype.is_floating_point
    ),
    "a strided parameter": lambda t: torch.nn.Parameter(
        torch.empty((*t.shape, 2), dtype=t.dtype)[..., 1], requires_grad=t.dtype.is_floating_point
    ),
    "at an odd address": lambda t: (
        torch.empty(t.nbytes + t.element_size(), dtype=torch.uint8)[t.element_size() :]
        .view(t.dtype)
        .view(t.shape)
    ),
}


@pytest.mark.parametrize("place", PLACES)
@pytest.mark.parametrize("small", [False, True])
def test_what_the_library_reads(
    tmp_path: Path, request: pytest.FixtureRequest, threads: int, place: str, small: bool
) -> None:
    if small:
        request.getfixturevalue("small_pieces")
    _parts(tmp_path)
    saved = {name: load_file(tmp_path / name) for name in ("a.safetensors", "b.safetensors")}
    reader = PartReader(tmp_path, dict.fromkeys(saved))
    requests = []
    for name, tensors in saved.items():
        assert set(reader.keys(name)) == set(tensors)
        for key, tensor in tensors.items():
            requests.append(_request(name, key, tensor, PLACES[place](tensor)))
    addresses = [request.tensor.data_ptr() for request in requests]
    told: list[int] = []
    reader.fill(requests, told.append)
    for request_, address in zip(requests, addresses, strict=True):
        expected = saved[request_.file][request_.key]
        assert _bytes(request_.tensor.detach()) == _bytes(expected), request_.key
        assert request_.tensor.data_ptr() == address
    assert sum(told) == sum(t.nbytes for tensors in saved.values() for t in tensors.values())


def test_a_tensor_larger_than_all_else_is_read_by_several(
    tmp_path: Path, threads: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    tensors = {"huge": _random(3 << 20), "small": _random(5)}
    save_file(tensors, tmp_path / "a.safetensors")
    readers: set[int] = set()
    read = jobs.Large._read

    def noted(self: jobs.Large, index: int, worker: pool.Worker, digest: object) -> None:
        readers.add(id(worker))
        read(self, index, worker, digest)

    monkeypatch.setattr(jobs.Large, "_read", noted)
    monkeypatch.setattr(jobs, "SEGMENT", 1 << 16)
    reader = PartReader(tmp_path, {"a.safetensors": None})
    places = {key: torch.zeros_like(tensor) for key, tensor in tensors.items()}
    reader.fill([_request("a.safetensors", key, tensors[key], t) for key, t in places.items()])
    assert all(
        torch.equal(places[key].view(torch.int32), t.view(torch.int32))
        for key, t in tensors.items()
    )
    assert len(readers) <= threads


def test_the_same_bytes_into_two_places_and_twice_into_one(tmp_path: Path, threads: int) -> None:
    saved = _parts(tmp_path)["b.safetensors"]
    reader = PartReader(tmp_path, {"b.safetensors": None})
    one, other = torch.zeros(70, 33), torch.zeros(70, 33)
    requests = [_request("b.safetensors", "large", saved["large"], t) for t in (one, other, one)]
    reader.fill(requests * 20)
    assert _bytes(one) == _bytes(other) == _bytes(saved["large"])


@pytest.mark.parametrize("place", ["the same", "overlapping", "interleaved"])
def test_where_places_meet_the_later_request_wins(
    tmp_path: Path, threads: int, place: str, small_pieces: None
) -> None:
    tensors = {f"{i}": torch.full((40,), float(i)) for i in range(1, 6)}
    save_file(tensors, tmp_path / "a.safetensors")
    reader = PartReader(tmp_path, {"a.safetensors": None})
    memory, expected = torch.zeros(100), torch.zeros(100)

    def view(base: torch.Tensor, index: int) -> torch.Tensor:
        start, step = {
            "the same": (0, 1),
            "overlapping": (index * 7, 1),
            "interleaved": (index % 2, 2),
        }[place]
        return base[start : start + 40 * step : step]

    order = [3, 1, 4, 5, 2]
    for index in order:
        view(expected, index).copy_(tensors[f"{index}"])
    reader.fill(
        [
            _request("a.safetensors", f"{index}", tensors[f"{index}"], view(memory, index))
            for index in order
        ]
    )
    assert memory.tolist() == expected.tolist()


def test_groups_of_tensors_that_share_memory() -> None:
    memory = torch.zeros(10, 10)
    apart = torch.zeros(3)
    tensors = [
        memory[:5],
        apart,
        memory[5:],
        memory[4:6],
        torch.empty(0),
        apart[1:],
        memory.t()[9:],
    ]
    assert sorted(plan.clusters(tensors)) == [[0, 2, 3, 6], [1, 5]]
    assert plan.clusters([memory[:5], memory[5:]]) == []


@pytest.mark.parametrize(
    "tensor",
    [
        torch.zeros(7),
        torch.zeros(5, 3),
        torch.zeros(3, 5, dtype=torch.float64),
        torch.zeros(1, 3, 5),
    ],
)
def test_another_form_is_never_filled(tmp_path: Path, tensor: torch.Tensor) -> None:
    save_file({"a": torch.ones(3, 5), "b": torch.ones(3, 5)}, tmp_path / "a.safetensors")
    reader = PartReader(tmp_path, {"a.safetensors": None})
    fits = torch.zeros(3, 5)
    with pytest.raises(TensorMismatchError, match=r"^b in .*a\.safetensors is \[3, 5\] F32"):
        reader.fill(
            [Request("a.safetensors", "a", None, fits), Request("a.safetensors", "b", None, tensor)]
        )
    assert not fits.any()
    assert not tensor.any()


def test_what_can_not_be_filled_is_named(tmp_path: Path) -> None:
    save_file({"a": torch.ones(3)}, tmp_path / "a.safetensors")
    reader = PartReader(tmp_path, {"a.safetensors": None})
    with pytest.raises(TensorMismatchError, match="a can't be filled: it is on the meta device"):
        reader.fill([Request("a.safetensors", "a", None, torch.empty(3, device="meta"))])
    with pytest.raises(IncompleteError, match="holds no tensor 'b'"):
        reader.get("a.safetensors", "b")


def test_get_and_verified_give_memory_of_their_own(tmp_path: Path) -> None:
    saved = _parts(tmp_path)["a.safetensors"]
    reader = PartReader(tmp_path, {"a.safetensors": None})
    for key, tensor in saved.items():
        for read in (
            reader.get("a.safetensors", key),
            reader.verified("a.safetensors", key, checksum(_bytes(tensor))),
        ):
            assert (read.shape, read.dtype, _bytes(read)) == (
                tensor.shape,
                tensor.dtype,
                _bytes(tensor),
            )
        assert reader.form("a.safetensors", key) == (
            list(tensor.shape),
            next(name for name in NAMES if torch_dtype(name) == tensor.dtype),
        )
    reader.get("a.safetensors", "F32").zero_()
    assert _bytes(reader.get("a.safetensors", "F32")) == _bytes(saved["F32"])


def test_an_interrupt_while_reading_ends_every_thread(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(pool, "threads", lambda: 3)
    monkeypatch.setattr(jobs, "SEGMENT", 1 << 16)
    tensors = {f"{i}": _random(1 << 20, seed=i) for i in range(8)}
    save_file(tensors, tmp_path / "a.safetensors")
    reader = PartReader(tmp_path, {"a.safetensors": None})

    def interrupt(count: int) -> None:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        reader.fill(
            [_request("a.safetensors", key, t, torch.zeros_like(t)) for key, t in tensors.items()],
            interrupt,
        )
    assert not [thread for thread in threading.enumerate() if thread.name == "vss-read"]
