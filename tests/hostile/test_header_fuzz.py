"""Headers that hypothesis makes up: an error of ours, or exactly the tensors that the bytes hold."""

import json
import math
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from safetensors.torch import load_file, save

from tests.hostile import spoil
from vllm_sharded_state.checkpoint.reading import PartReader
from vllm_sharded_state.errors import ShardedStateError

FUZZ = settings(
    derandomize=True,
    deadline=None,
    max_examples=400,
    suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow],
)
NAME = "part.safetensors"
TENSORS = {
    "a": torch.arange(6, dtype=torch.bfloat16).view(2, 3),
    "b": torch.arange(4, dtype=torch.float32),
    "c.scale": torch.tensor(0.25),
    "d": torch.empty(0, 4),
    "e": torch.arange(8, dtype=torch.int8).view(2, 2, 2),
}
GOOD = save(TENSORS)
SIZE = {
    "BF16": 2,
    "F16": 2,
    "F32": 4,
    "I8": 1,
    "U8": 1,
    "BOOL": 1,
    "I64": 8,
    "F64": 8,
    "F8_E4M3": 1,
}

numbers = st.one_of(
    st.integers(-2, 64),
    st.sampled_from(
        [2**31, 2**32, 2**63 - 1, 2**63, 2**64 - 1, 2**64, 2**64 + 2, -(2**63), 10**30]
    ),
)
anything = st.recursive(
    st.one_of(st.none(), st.booleans(), numbers, st.floats(), st.text(max_size=8)),
    lambda inner: st.one_of(
        st.lists(inner, max_size=4), st.dictionaries(st.text(max_size=8), inner, max_size=4)
    ),
    max_leaves=8,
)
dtypes = st.sampled_from([*SIZE, "F4", "bf16", "X"])
entries = st.one_of(
    st.fixed_dictionaries(
        {
            "dtype": dtypes,
            "shape": st.lists(numbers, max_size=4),
            "data_offsets": st.lists(numbers, min_size=2, max_size=2),
        }
    ),
    st.dictionaries(st.sampled_from(["dtype", "shape", "data_offsets", "x"]), anything, max_size=4),
    anything,
)
headers = st.dictionaries(
    st.one_of(st.sampled_from([*TENSORS, "__metadata__"]), st.text(max_size=8)), entries, max_size=4
)


def _read(directory: Path) -> dict[str, torch.Tensor] | None:
    """What the reader makes of the file; None where it refuses, naming it."""
    refusal = None
    try:
        reader = PartReader(directory, {NAME: None})
        return {key: reader.get(NAME, key) for key in reader.keys(NAME)}
    except ShardedStateError as error:
        refusal = str(error)
    assert NAME in refusal
    return None


def _check(directory: Path, data: bytes) -> None:
    """Each tensor that was read is, by Python's own JSON and slices, what lies in the file."""
    (directory / NAME).write_bytes(data)
    found = _read(directory)
    if found is None:
        return
    length = int.from_bytes(data[:8], "little")
    header: dict[str, Any] = json.loads(data[8 : 8 + length])
    header.pop("__metadata__", None)
    assert found.keys() == header.keys()
    covered = []
    for key, tensor in found.items():
        entry = header[key]
        start, end = entry["data_offsets"]
        assert list(tensor.shape) == entry["shape"]
        assert end - start == math.prod(entry["shape"]) * SIZE[entry["dtype"]]
        assert 0 <= start <= end <= len(data) - 8 - length
        raw = tensor.reshape(-1).view(torch.uint8).numpy().tobytes() if tensor.numel() else b""
        assert raw == data[8 + length :][start:end]
        covered += range(start, end)
    assert sorted(covered) == list(range(len(data) - 8 - length)), "each byte in one tensor"


def test_a_good_file_is_read(tmp_path: Path) -> None:
    (tmp_path / NAME).write_bytes(GOOD)
    found, library = _read(tmp_path), load_file(tmp_path / NAME)
    assert found is not None
    assert found.keys() == library.keys()
    assert all(torch.equal(found[key], library[key]) for key in library)


@FUZZ
@given(headers, st.integers(0, 64))
def test_headers_of_all_kinds(tmp_path: Path, header: dict[str, Any], size: int) -> None:
    _check(tmp_path, spoil.join(json.dumps(header).encode(), bytes(range(size))))


@FUZZ
@given(st.data())
def test_good_headers_with_something_changed(tmp_path: Path, data: st.DataObject) -> None:
    length = int.from_bytes(GOOD[:8], "little")
    header = json.loads(GOOD[8 : 8 + length])
    key = data.draw(st.sampled_from(sorted(TENSORS)))
    field = data.draw(st.sampled_from(["dtype", "shape", "data_offsets", None]))
    if field is None:
        header[key] = data.draw(entries)
    elif field == "dtype":
        header[key][field] = data.draw(st.one_of(dtypes, anything))
    else:
        values = header[key][field]
        change = data.draw(st.one_of(anything, st.tuples(st.integers(0, 3), numbers)))
        if isinstance(change, tuple):
            header[key][field] = [*values[: change[0]], change[1], *values[change[0] + 1 :]]
        else:
            header[key][field] = change
    _check(tmp_path, spoil.join(json.dumps(header).encode(), GOOD[8 + length :]))


@FUZZ
@given(st.binary(max_size=200))
def test_bytes_of_all_kinds(tmp_path: Path, data: bytes) -> None:
    _check(tmp_path, data)


@FUZZ
@given(st.integers(0, len(GOOD) - 1), st.binary(max_size=4), st.integers(0, 8))
def test_good_files_with_bytes_changed(tmp_path: Path, place: int, put: bytes, lost: int) -> None:
    _check(tmp_path, GOOD[:place] + put + GOOD[place + lost :])


@pytest.mark.parametrize("size", range(0, len(GOOD), 7))
def test_good_files_cut(tmp_path: Path, size: int) -> None:
    (tmp_path / NAME).write_bytes(GOOD[:size])
    assert _read(tmp_path) is None
