"""The directory on disk by itself: parts against the safetensors library."""

import json
import math

import pytest
import torch
from safetensors.torch import load_file

from vllm_sharded_state.checkpoint import reading, writing
from vllm_sharded_state.errors import IncompleteError
from vllm_sharded_state.state import plain

TENSORS = {
    "matrix": torch.arange(6.0).view(2, 3),
    "transposed": torch.arange(6, dtype=torch.int32).view(2, 3).t(),
    "every second": torch.arange(10, dtype=torch.bfloat16)[::2],
    "one element with a stride": torch.arange(4.0).view(2, 2)[:1, 1],
    "scalar": torch.tensor(0.0123),
    "empty": torch.empty(0, 4),
    "fp8": torch.tensor([0.5, 1.0, -448.0]).to(torch.float8_e4m3fn),
    'a "quoted" náme': torch.tensor([True, False]),
}


def _write(directory, max_size=None, tensors=TENSORS):
    writer = writing.PartWriter(
        directory, lambda part: f"p-{part}.safetensors", max_size, writing.header_room(tensors)
    )
    written = {key: writer.add(key, tensor) for key, tensor in tensors.items()}
    writer.close()
    return writer, written


def _bytes(tensor):
    return tensor.clone(memory_format=torch.contiguous_format).view(-1).view(torch.uint8)


@pytest.mark.parametrize(("max_size", "files"), [(None, 1), (1, 8), (40, 3)])
def test_the_library_reads_what_was_streamed(tmp_path, max_size, files):
    writer, written = _write(tmp_path, max_size)
    writer.commit()
    assert sorted(writer.files) == sorted(path.name for path in tmp_path.iterdir())
    assert len(writer.files) == files
    read = {}
    for name in writer.files:
        read |= load_file(tmp_path / name)
    assert read.keys() == TENSORS.keys()
    for key, tensor in TENSORS.items():
        assert (read[key].shape, read[key].dtype) == (tensor.shape, tensor.dtype)
        assert torch.equal(_bytes(read[key]), _bytes(tensor)), key
        assert key in load_file(tmp_path / written[key][0])


def test_nothing_has_its_name_before_the_commit_and_nothing_stays_after_abandoning(tmp_path):
    writer, _ = _write(tmp_path, 40)
    assert all(path.name.startswith(".") for path in tmp_path.iterdir())
    writer.abandon()
    assert not list(tmp_path.iterdir())


def test_abandoning_leaves_an_earlier_part_alone(tmp_path):
    _write(tmp_path)[0].commit()
    before = (tmp_path / "p-0.safetensors").read_bytes()
    _write(tmp_path, tensors={"matrix": torch.zeros(2, 3)})[0].abandon()
    assert [path.name for path in tmp_path.iterdir()] == ["p-0.safetensors"]
    assert (tmp_path / "p-0.safetensors").read_bytes() == before


@pytest.mark.parametrize("key", [key for key in TENSORS if TENSORS[key].numel()])
def test_a_flipped_bit_in_any_tensor_is_noticed(tmp_path, key):
    writer, written = _write(tmp_path)
    writer.commit()
    file, checksum = written[key]
    path = tmp_path / file
    data = bytearray(path.read_bytes())
    header = json.loads(data[8 : 8 + int.from_bytes(data[:8], "little")])
    start = 8 + int.from_bytes(data[:8], "little") + header[key]["data_offsets"][0]
    reader = reading.PartReader(tmp_path, dict(writer.files))
    assert torch.equal(_bytes(reader.verified(file, key, checksum)), _bytes(TENSORS[key]))
    data[start] ^= 1
    path.write_bytes(data)
    damaged = reading.PartReader(tmp_path, dict(writer.files))
    with pytest.raises(IncompleteError, match="is not what was saved"):
        damaged.verified(file, key, checksum)


def test_a_part_that_is_missing_or_cut_off_is_named(tmp_path):
    writer, _ = _write(tmp_path)
    writer.commit()
    sizes = dict(writer.files)
    path = tmp_path / "p-0.safetensors"
    whole = path.read_bytes()
    path.write_bytes(whole[:-1])
    with pytest.raises(IncompleteError, match=f"{len(whole) - 1} bytes, {len(whole)} were written"):
        reading.PartReader(tmp_path, sizes)
    path.write_bytes(b"\xff" * len(whole))
    with pytest.raises(IncompleteError, match="no readable safetensors file"):
        reading.PartReader(tmp_path, sizes)
    path.unlink()
    with pytest.raises(IncompleteError, match=r"p-0\.safetensors is missing"):
        reading.PartReader(tmp_path, sizes)


def test_stale_parts_are_those_of_the_same_name_only(tmp_path):
    for name in (
        "m-1-p-0.s",
        "m-1-p-12.s",
        "m-11-p-0.s",
        "m-1-p-0.s.bak",
        "config.json",
        "m-1-p-x.s",
    ):
        (tmp_path / name).touch()
    found = writing.stale_parts(tmp_path, lambda part: f"m-1-p-{part}.s", {"m-1-p-0.s"})
    assert [path.name for path in found] == ["m-1-p-12.s"]


@pytest.mark.parametrize(
    "value",
    [
        None,
        True,
        0,
        -7,
        2**60,
        "text",
        0.1,
        -0.0,
        math.inf,
        -math.inf,
        5e-324,
        {1, "a"},
        frozenset(),
    ],
)
def test_values_come_back_as_they_were(value):
    back = plain.decode(json.loads(json.dumps(plain.encode(value))))
    assert plain.equal(back, value)
    assert type(back) is type(value)


def test_nan_and_signed_zero_are_told_apart():
    assert plain.equal(plain.decode(plain.encode(math.nan)), math.nan)
    assert not plain.equal(0.0, -0.0)
    assert not plain.equal(1, 1.0)
    assert not plain.equal(True, 1)
