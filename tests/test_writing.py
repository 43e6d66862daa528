"""Parts as they are streamed: against the safetensors library, and against the bytes on disk."""

import json
import os
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from safetensors.torch import load_file
from xxhash import xxh3_128

from vllm_sharded_state.checkpoint import checksum, staging, writing
from vllm_sharded_state.errors import SaveError

BASE = torch.arange(2 * 3 * 4 * 5, dtype=torch.float32).view(2, 3, 4, 5)
COMPLEX = torch.complex(torch.arange(4.0), torch.arange(4.0) - 7)

#: Tensors whose bytes do not lie in memory as they go to the file.
STRIDED = {
    "transposed": BASE.transpose(0, 3),
    "permuted": BASE.permute(3, 1, 0, 2),
    "sliced": BASE[:, 1:, ::2, 1:4],
    "expanded": BASE[:1, :1].expand(2, 3, 4, 5),
    "row": BASE.view(-1)[7:19],
    "one long row": BASE.view(1, 120)[:, ::3],
    "conjugated": COMPLEX.conj(),
    "negative": COMPLEX.conj().imag,
    "windows": BASE.view(-1).unfold(0, 6, 2),
}


def _write(
    directory: Path, tensors: dict[str, torch.Tensor], max_size: int | None = None, **more: Any
) -> tuple[writing.PartWriter, dict[str, tuple[str, str]]]:
    room = more.pop("room", writing.header_room(tensors))
    name = more.pop("name", lambda part: f"p-{part}.safetensors")
    writer = writing.PartWriter(directory, name, max_size, room, **more)
    written = {key: writer.add(key, tensor) for key, tensor in tensors.items()}
    writer.close()
    writer.commit()
    return writer, written


@pytest.mark.parametrize("chunk", [8, 40, 1 << 20])
@pytest.mark.parametrize("key", STRIDED)
def test_strided_tensors_are_written_in_row_major_order(
    tmp_path: Path, key: str, chunk: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(checksum, "CHUNK", chunk)
    tensor = STRIDED[key]
    if tensor.dim() > 1:
        index = torch.cartesian_prod(*map(torch.arange, tensor.shape)).unbind(1)
        expected = tensor[index].resolve_conj().resolve_neg().numpy().tobytes()
    else:
        expected = torch.stack([x.resolve_conj().resolve_neg() for x in tensor]).numpy().tobytes()
    pieces = [bytes(piece) for piece in checksum.host_bytes(tensor)]
    assert b"".join(pieces) == expected
    if not tensor.is_contiguous() or tensor.is_conj():
        assert max(map(len, pieces)) <= chunk
    _, written = _write(tmp_path, {key: tensor})
    read = load_file(tmp_path / "p-0.safetensors")[key]
    assert read.numpy().tobytes() == expected
    assert tuple(read.shape) == tuple(tensor.shape)
    assert written[key][1] == xxh3_128(expected).hexdigest()


def test_pieces_of_a_strided_tensor_share_one_buffer(monkeypatch: pytest.MonkeyPatch) -> None:
    """What is in memory at a time is one piece, however large the tensor."""
    monkeypatch.setattr(checksum, "CHUNK", 64)
    pieces = checksum.host_bytes(BASE.transpose(0, 3))
    places = [torch.frombuffer(piece, dtype=torch.uint8).data_ptr() for piece in pieces]
    assert len(places) == 10, "480 bytes, three rows of 16 at a time"
    assert len(set(places)) == 1


def _check_file(path: Path, entry: Any, expected: list[tuple[str, bytes]]) -> None:
    """Size and header checksum are those of the file, and tensors lie without gap or overlap."""
    data = path.read_bytes()
    length = 8 + int.from_bytes(data[:8], "little")
    assert (entry.size, entry.header) == (len(data), xxh3_128(data[:length]).hexdigest())
    assert length % 4096 == 0, "tensors begin on a page"
    header = json.loads(data[8:length])
    del header["__metadata__"]
    assert list(header) == [key for key, _ in expected]
    offset = 0
    for key, content in expected:
        assert header[key]["data_offsets"] == [offset, offset + len(content)]
        offset += len(content)
    assert data[length:] == b"".join(content for _, content in expected)


@settings(
    max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
@given(
    sizes=st.lists(st.integers(0, 90), min_size=1, max_size=12),
    max_size=st.sampled_from([None, 1, 50, 100]),
    most=st.sampled_from([1, 7, 1000]),
)
def test_any_sizes_lie_one_behind_the_other(
    tmp_path: Path, sizes: list[int], max_size: int | None, most: int
) -> None:
    """With a buffer of 40 bytes and steps of 16: small and large ones follow each other in all ways.

    The file system takes at most `most` bytes at a time.
    """
    directory = tmp_path / staging.new_id()
    directory.mkdir()
    tensors = {
        f"t{i}": torch.randint(256, (size,), dtype=torch.uint8) for i, size in enumerate(sizes)
    }
    real = os.pwrite
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(writing, "BUFFER", 40)
        patch.setattr(writing, "STEP", 16)
        patch.setattr(os, "pwrite", lambda fd, data, at: real(fd, data[:most], at))
        patch.setattr(os, "fsync", lambda fd: None)
        writer, written = _write(directory, tensors, max_size)
    assert {file for file, _ in written.values()} == writer.files.keys() == {*os.listdir(directory)}
    for name, entry in writer.files.items():
        inside = [(k, t.numpy().tobytes()) for k, t in tensors.items() if written[k][0] == name]
        _check_file(directory / name, entry, inside)
        size = sum(len(content) for _, content in inside)
        assert max_size is None or size <= max_size or len(inside) == 1


def test_dtypes_whose_sizes_leave_the_next_tensor_at_an_odd_place(tmp_path: Path) -> None:
    tensors = {
        "three bytes": torch.tensor([1, 2, 3], dtype=torch.uint8),
        "float": torch.tensor([0.1, -2.5]),
        "one more": torch.tensor([True]),
        "double": torch.tensor([1e300], dtype=torch.float64),
    }
    _write(tmp_path, tensors)
    read = load_file(tmp_path / "p-0.safetensors")
    assert all(torch.equal(read[key], tensor) for key, tensor in tensors.items())


def test_small_tensors_share_their_writes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    writes: list[int] = []
    real = os.pwrite

    def pwrite(fd: int, data: memoryview, at: int) -> int:
        writes.append(len(data))
        return real(fd, data, at)

    monkeypatch.setattr(os, "pwrite", pwrite)
    tensors = {f"t{i}": torch.full((100,), float(i)) for i in range(5000)}
    _write(tmp_path, tensors)
    assert len(writes) == 3, "two for 2 MB of tensors, one for the header"
    read = load_file(tmp_path / "p-0.safetensors")
    assert all(torch.equal(read[key], tensor) for key, tensor in tensors.items())


def test_a_full_header_begins_another_part(tmp_path: Path) -> None:
    tensors = {f"layer.{i}.weight": torch.tensor([float(i)]) for i in range(200)}
    writer, written = _write(tmp_path, tensors, room=4000)
    assert len(writer.files) > 2
    read = {key: load_file(tmp_path / file)[key] for key, (file, _) in written.items()}
    assert all(torch.equal(read[key], tensor) for key, tensor in tensors.items())


def test_a_full_header_is_an_error_where_parts_have_one_name(tmp_path: Path) -> None:
    tensors = {f"layer.{i}.weight": torch.tensor([float(i)]) for i in range(200)}
    with pytest.raises(SaveError, match="gives one name only"):
        _write(tmp_path, tensors, room=4000, name=lambda part: "only.safetensors")


def test_a_key_longer_than_a_header_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(SaveError, match="too long"):
        _write(tmp_path, {"k" * 10_000: torch.zeros(1)}, room=100)


@pytest.mark.parametrize("dims", [0, 1, 6, 30])
def test_the_room_for_the_header_is_enough_for_one_part(tmp_path: Path, dims: int) -> None:
    shape = (1,) * max(0, dims - 1) + (3,) * min(1, dims)
    keys = [f'"\\ é\U0001f600 {i}' for i in range(300)]
    writer, _ = _write(tmp_path, {key: torch.zeros(shape) for key in keys})
    assert len(writer.files) == 1
    assert load_file(tmp_path / "p-0.safetensors").keys() == set(keys)


def test_an_error_while_a_thread_hashes_reaches_the_caller(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    writer = writing.PartWriter(tmp_path, lambda part: f"p-{part}", None, 4000)
    writer.add("small", torch.zeros(3))
    count = 0

    def pwrite(fd: int, data: memoryview, at: int) -> int:
        nonlocal count
        count += 1
        if count == 3:
            raise OSError(28, "No space left on device")
        return len(data)

    monkeypatch.setattr(os, "pwrite", pwrite)
    with pytest.raises(OSError, match="No space"):
        writer.add("large", torch.zeros(4 << 20))
    writer.abandon()
    assert not os.listdir(tmp_path)
    assert not writer.files
