"""Headers that lie: each is refused with its reason, in bounded time and memory, and none is a crash."""

import json
import resource
import struct
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file

from vllm_sharded_state.checkpoint import header, reading
from vllm_sharded_state.errors import IncompleteError

A = {"dtype": "F32", "shape": [2], "data_offsets": [0, 8]}
B = {"dtype": "U8", "shape": [3], "data_offsets": [8, 11]}


def _entry(**changes: object) -> dict[str, object]:
    return {**A, **changes}


def _parse(text: bytes | dict[str, object], data: int) -> dict[str, header.Place]:
    raw = text if isinstance(text, bytes) else json.dumps(text).encode()
    return header.parse(raw, header.PREFIX + len(raw) + data)


def test_a_header_as_it_should_be() -> None:
    text = json.dumps({"b": B, "__metadata__": {"format": "pt"}, "a": A}).encode() + b"   "
    begin = 8 + len(text)
    places = _parse(text, 11)
    assert {
        key: (p.dtype, p.shape, p.start - begin, p.end - begin) for key, p in places.items()
    } == {
        "a": ("F32", [2], 0, 8),
        "b": ("U8", [3], 8, 11),
    }


@pytest.mark.parametrize("name", ["shape", 'a "quoted" náme', "data_offsets", "\\", "", "{" * 99])
def test_names_that_look_like_something_else_are_names(tmp_path: Path, name: str) -> None:
    save_file({name: torch.arange(3), "other": torch.zeros(2)}, tmp_path / "a.safetensors")
    reader = reading.PartReader(tmp_path, {"a.safetensors": None})
    assert set(reader.keys("a.safetensors")) == {name, "other"}
    assert torch.equal(reader.get("a.safetensors", name), torch.arange(3))


DOUBLED = b'"dtype":"F32","shape":[2],"data_offsets":[0,8]'
LIES = {
    "no object": (b"[]", 0, "no JSON object"),
    "white space first": (b" {}", 0, "no JSON object"),
    "nothing": (b"", 0, "no JSON object"),
    "cut off": (b'{"a":{"dtype"', 0, "as the format says"),
    "something after it": (b"{} x", 0, "as the format says"),
    "zeros after it": (b"{}\0\0", 0, "as the format says"),
    "no UTF-8": (b'{"\xff":' + json.dumps(A).encode() + b"}", 8, "as the format says"),
    "half a surrogate": (b'{"\\ud800":' + json.dumps(A).encode() + b"}", 8, "as the format says"),
    "not a number": (b'{"a":{"shape":[NaN]}}', 0, "as the format says"),
    "deep arrays": (b'{"a":{"shape":' + b"[" * 10**6, 0, "as the format says"),
    "deep objects": (b'{"a":' * 10**5, 0, "as the format says"),
    "a number of 5000 digits": (b'{"a":{"shape":[' + b"9" * 5000 + b"]}}", 0, "as the format says"),
    "a fraction": ({"a": _entry(shape=[2.0])}, 8, "as the format says"),
    "true": ({"a": _entry(shape=[True, 2])}, 8, "as the format says"),
    "null": ({"a": None}, 0, "as the format says"),
    "metadata of numbers": ({"__metadata__": {"a": 1}}, 0, "as the format says"),
    "metadata of lists": ({"__metadata__": {"a": [1]}}, 0, "else than strings"),
    "a key twice": (b'{"a":{%b},"a":{%b}}' % (DOUBLED, DOUBLED), 8, "has 'a' twice"),
    "a key twice, escaped": (b'{"a":{%b},"\\u0061":{%b}}' % (DOUBLED, DOUBLED), 8, "has 'a' twice"),
    "a key twice, its fields escaped": (
        b'{"a":{%b},"a":{%b}}' % (DOUBLED, DOUBLED.replace(b"dtype", b"d\\u0074ype")),
        8,
        "has 'a' twice",
    ),
    "a field twice": (b'{"a":{"dtype":"U8",%b}}' % DOUBLED, 8, "has 'dtype' twice"),
    "metadata twice": (
        b'{"__metadata__":{"a":"b"},"__metadata__":{},"a":{%b}}' % DOUBLED,
        8,
        "has '__metadata__' twice",
    ),
    "no dtype": ({"a": {"shape": [2], "data_offsets": [0, 8]}}, 8, "has no dtype"),
    "another field": ({"a": _entry(more=[1])}, 8, "other fields"),
    "a dtype that is a list": ({"a": _entry(dtype=[1])}, 8, "wrong type"),
    "a shape that is text": ({"a": _entry(shape="2")}, 8, "wrong type"),
    "an unknown dtype": ({"a": _entry(dtype="F9")}, 8, "unknown dtype 'F9'"),
    "three offsets": ({"a": _entry(data_offsets=[0, 8, 8])}, 8, "outside"),
    "offsets backwards": ({"a": _entry(data_offsets=[8, 0])}, 8, "outside"),
    "a negative offset": ({"a": _entry(data_offsets=[-8, 0])}, 8, "outside"),
    "past the end": ({"a": _entry(data_offsets=[8, 16])}, 8, "outside"),
    "an offset beyond 64 bits": ({"a": _entry(data_offsets=[0, 2**70])}, 8, "outside"),
    "a negative dimension": ({"a": _entry(shape=[-1, -2])}, 8, "no tensor can have"),
    "too many dimensions": ({"a": _entry(shape=[1] * 65)}, 8, "no tensor can have"),
    "a shape that is too small": ({"a": _entry(shape=[1])}, 8, "does not fill"),
    "a product that wraps to 8": ({"a": _entry(shape=[2**62 + 2, 2**62])}, 8, "does not fill"),
    "empty, of a size beyond 64 bits": (
        {"a": _entry(shape=[0, 2**62, 2], data_offsets=[0, 0])},
        0,
        "does not fill",
    ),
    "an overlap": ({"a": A, "b": {**B, "data_offsets": [7, 10]}}, 10, "'b' overlaps"),
    "the same range twice": ({"a": A, "b": A}, 8, "'b' overlaps"),
    "a gap": ({"a": A, "b": {**B, "data_offsets": [9, 12]}}, 12, "'b' follows a gap"),
    "a gap at the start": ({"a": _entry(data_offsets=[1, 9])}, 9, "'a' follows a gap"),
    "bytes that nobody has": ({"a": A}, 9, "its tensors end at"),
    "a name of a million letters": ({"a" * 10**6: _entry(shape=[1])}, 8, "does not fill"),
}


@pytest.mark.parametrize("lie", LIES)
def test_a_header_that_lies_is_refused(tmp_path: Path, lie: str) -> None:
    text, size, reason = LIES[lie]
    raw = text if isinstance(text, bytes) else json.dumps(text).encode()
    path = tmp_path / "a.safetensors"
    path.write_bytes(struct.pack("<Q", len(raw)) + raw + b"\0" * size)
    with pytest.raises(IncompleteError) as caught:
        reading.PartReader(tmp_path, {"a.safetensors": None})
    message = str(caught.value)
    assert message.startswith(f"{path} is no readable safetensors file: ")
    assert reason in message
    assert len(message) < 1000


@pytest.mark.parametrize("claimed", [3, 4, 99, 10**8, 10**8 + 1, 2**63, 2**64 - 1])
@pytest.mark.parametrize("size", [0, 1, 7, 8, 10])
def test_a_length_beyond_the_file_is_refused(tmp_path: Path, size: int, claimed: int) -> None:
    raw = struct.pack("<Q", claimed) + b"{}"
    (tmp_path / "a.safetensors").write_bytes(raw[:size])
    with pytest.raises(IncompleteError, match="no readable safetensors file: it"):
        reading.PartReader(tmp_path, {"a.safetensors": None})


@pytest.mark.parametrize("filler", [b'"%08d":{},', b'"%08d":{"a":[]},', b'"%08d":0,'])
def test_a_header_of_many_small_things_takes_little_memory(tmp_path: Path, filler: bytes) -> None:
    body = b"{" + b"".join(filler % number for number in range(3_000_000))
    raw = body[:-1] + b"}"
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    with pytest.raises(header.HeaderError):
        header.parse(raw, 8 + len(raw))
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 200 << 10  # KiB


_JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=3),
    lambda inner: (
        st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=3), inner, max_size=3)
    ),
    max_leaves=8,
)
_FIELDS = st.fixed_dictionaries(
    {},
    optional={
        "dtype": st.sampled_from(["F32", "U8", "BOOL", "C64", "x"]) | _JSON,
        "shape": st.lists(st.integers(-1, 4), max_size=3) | _JSON,
        "data_offsets": st.lists(st.integers(-1, 24), min_size=2, max_size=2) | _JSON,
    },
)


@settings(max_examples=300, deadline=None)
@given(
    st.dictionaries(st.sampled_from(["a", "b", "__metadata__"]), _FIELDS | _JSON),
    st.integers(0, 24),
)
def test_what_is_accepted_the_library_accepts_and_reads_alike(
    tmp_path_factory: pytest.TempPathFactory, entries: dict[str, object], size: int
) -> None:
    raw = json.dumps(entries).encode()
    path = tmp_path_factory.getbasetemp() / "any.safetensors"
    path.write_bytes(struct.pack("<Q", len(raw)) + raw + bytes(range(size)))
    try:
        reader = reading.PartReader(path.parent, {path.name: None})
    except IncompleteError:
        return
    try:
        with safe_open(path, framework="pt") as file:
            assert sorted(file.keys()) == sorted(reader.keys(path.name))
            for key in file.keys():  # noqa: SIM118 - no dictionary
                ours, theirs = reader.get(path.name, key), file.get_tensor(key)
                assert (ours.shape, ours.dtype) == (theirs.shape, theirs.dtype)
                assert ours.reshape(-1).view(torch.uint8).tolist() == (
                    theirs.reshape(-1).view(torch.uint8).tolist()
                )
    except SafetensorError as error:
        raise AssertionError(f"accepted, and refused by the library: {raw!r}") from error
    finally:
        reader.close()
