"""The reader through runai-model-streamer, on disk and in a bucket, against safetensors' own."""

import json
import re
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from xxhash import xxh3_128

from tests.remote.bucket import Bucket
from vllm_sharded_state.checkpoint import store
from vllm_sharded_state.checkpoint.manifest import FileEntry
from vllm_sharded_state.checkpoint.reading import Request
from vllm_sharded_state.checkpoint.streaming import StreamReader
from vllm_sharded_state.errors import FetchError, IncompleteError, TensorMismatchError

DTYPES = [
    *(torch.float64, torch.float32, torch.float16, torch.bfloat16, torch.complex64, torch.bool),
    *(torch.float8_e4m3fn, torch.float8_e5m2, torch.int64, torch.int32, torch.int16, torch.int8),
    *(torch.uint64, torch.uint32, torch.uint16, torch.uint8),
]
FILES = ("a.safetensors", "b.safetensors")
Tensors = dict[str, torch.Tensor]
Place = Callable[[Path], str]


def raw(tensor: torch.Tensor) -> bytes:
    packed = tensor.clone(memory_format=torch.contiguous_format)
    return packed.view(-1).view(torch.uint8).numpy().tobytes()


def entry(path: Path) -> FileEntry:
    data = path.read_bytes()
    head = 8 + int.from_bytes(data[:8], "little")
    return FileEntry(size=len(data), header=xxh3_128(data[:head]).hexdigest())


def random(shape: tuple[int, ...], dtype: torch.dtype, seed: int) -> torch.Tensor:
    """Any bytes that are values of `dtype`."""
    count = torch.Size(shape).numel() * dtype.itemsize
    data = torch.randint(0, 256, (count,), dtype=torch.uint8, generator=torch.manual_seed(seed))
    if dtype is torch.bool:
        data &= 1
    return data.view(dtype).view(shape)


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Two files of all dtypes, sizes odd enough to leave tensors unaligned, scalars, empty ones."""
    directory = tmp_path_factory.mktemp("streamed")
    first: Tensors = {f"t.{i}": random((3, 5, 7), dtype, i) for i, dtype in enumerate(DTYPES)}
    second: Tensors = {f"scalar.{i}": random((), dtype, i) for i, dtype in enumerate(DTYPES)}
    second |= {"empty": torch.empty(0, 4), "large": random((1000, 777), torch.bfloat16, 7)}
    second |= {f"small.{i}": random((3,), torch.uint8, i) for i in range(300)}
    for name, tensors in zip(FILES, (first, second), strict=True):
        save_file(tensors, directory / name)
    return directory


@pytest.fixture(params=["disk", "bucket"])
def place(request: pytest.FixtureRequest) -> Place:
    """Puts a directory where the reader is to read it from; returns its base."""
    if request.param == "disk":
        return str
    bucket: Bucket = request.getfixturevalue("bucket")
    return lambda directory: bucket.put(directory, directory.name)


@pytest.fixture(params=["manifest", "no manifest"])
def entries(request: pytest.FixtureRequest, directory: Path) -> dict[str, FileEntry | None]:
    known = request.param == "manifest"
    return {name: entry(directory / name) if known else None for name in FILES}


def expected(directory: Path) -> dict[tuple[str, str], torch.Tensor]:
    return {
        (name, key): tensor for name in FILES for key, tensor in load_file(directory / name).items()
    }


def requests(tensors: dict[tuple[str, str], torch.Tensor]) -> list[Request]:
    return [
        Request(name, key, xxh3_128(raw(tensor)).hexdigest(), torch.zeros_like(tensor))
        for (name, key), tensor in tensors.items()
    ]


def test_every_tensor_comes_as_safetensors_reads_it(directory, place, entries, monkeypatch):
    monkeypatch.setattr(store, "BATCH", 5000)  # many batches, some of one tensor that is larger
    wanted = expected(directory)
    reader = StreamReader(place(directory), entries)
    assert {(name, key) for name in FILES for key in reader.keys(name)} == wanted.keys()
    asked = requests(wanted)
    read: list[int] = []
    reader.fill(asked, read.append)
    for request, tensor in zip(asked, wanted.values(), strict=True):
        assert raw(request.tensor) == raw(tensor), request.key
        shape, _ = reader.form(request.file, request.key)
        assert shape == list(tensor.shape)
    assert sum(read) == sum(tensor.nbytes for tensor in wanted.values())


def test_single_tensors_have_memory_of_their_own(directory, place, entries):
    reader = StreamReader(place(directory), entries)
    for (name, key), tensor in expected(directory).items():
        if key in ("large", "empty", "scalar.3", "small.7", "t.0"):
            digest = xxh3_128(raw(tensor)).hexdigest()
            first, second = reader.get(name, key), reader.verified(name, key, digest)
            with pytest.raises(IncompleteError, match=rf"{re.escape(key)} in {name}"):
                reader.verified(name, key, "0" * 32)
            assert raw(first) == raw(second) == raw(tensor)
            if tensor.numel():
                assert first.data_ptr() != second.data_ptr()


def test_strided_places_and_one_tensor_asked_for_twice(directory, place, entries):
    name, key = FILES[1], "large"
    wanted = expected(directory)[name, key]
    rows, columns = wanted.shape
    strided = torch.zeros(columns, rows, dtype=wanted.dtype).t()
    whole = torch.zeros_like(wanted)
    reader = StreamReader(place(directory), entries)
    reader.fill([Request(name, key, None, strided), Request(name, key, None, whole)])
    assert not strided.is_contiguous()
    assert raw(strided) == raw(whole) == raw(wanted)


def test_one_element_with_a_stride(place, tmp_path):
    """It counts as contiguous, whatever its stride."""
    saved = torch.tensor([0.0123])
    directory = tmp_path / "one"
    directory.mkdir()
    save_file({"one": saved}, directory / "one.safetensors")
    around = torch.zeros(2, 2)
    one = around[:1, 1]
    assert one.is_contiguous()
    assert one.stride() != (1,)
    reader = StreamReader(place(directory), {"one.safetensors": None})
    reader.fill([Request("one.safetensors", "one", None, one)])
    assert raw(one) == raw(saved)
    assert around.count_nonzero() == 1


def test_only_what_was_asked_for_is_fetched(directory, bucket):
    base = bucket.put(directory, "only")
    reader = StreamReader(base, {FILES[0]: entry(directory / FILES[0])})
    bucket.log.clear()
    tensor = expected(directory)[FILES[0], "t.0"]
    reader.fill([Request(FILES[0], "t.0", None, torch.zeros_like(tensor))])
    assert bucket.read() == {f"only/{FILES[0]}"}
    assert not any("/b.safetensors" in line for line in bucket.log)


@pytest.mark.parametrize("change", ["shape", "dtype"])
def test_a_tensor_of_another_form_is_refused_before_reading(directory, place, change):
    reader = StreamReader(place(directory), dict.fromkeys(FILES))
    wrong = torch.zeros(3, 5, 8) if change == "shape" else torch.zeros(3, 5, 7)
    right = torch.zeros(1000, 777, dtype=torch.bfloat16)
    with pytest.raises(TensorMismatchError, match=r"t\.0 in .*a\.safetensors"):
        reader.fill(
            [Request(FILES[1], "large", None, right), Request(FILES[0], "t.0", None, wrong)]
        )
    assert not right.any()


def test_a_key_that_is_not_there_is_named(directory, place):
    reader = StreamReader(place(directory), dict.fromkeys(FILES))
    with pytest.raises(IncompleteError, match=r"a\.safetensors holds no tensor 'none'"):
        reader.get(FILES[0], "none")


# --- damage ---------------------------------------------------------------


def copy(directory: Path, target: Path, change: Callable[[bytearray], object]) -> Path:
    """A copy of `directory` in which `change` edited the bytes of the first file."""
    target.mkdir()
    for name in FILES:
        data = bytearray((directory / name).read_bytes())
        if name == FILES[0]:
            change(data)
        (target / name).write_bytes(data)
    return target


def damaged_tensors(data: bytearray) -> None:
    """Flip a bit in the first and in the last tensor."""
    for position in (8 + int.from_bytes(data[:8], "little"), -1):
        data[position] ^= 1


def renamed_key(data: bytearray) -> None:
    data[:] = data.replace(b'"t.0"', b'"t.X"', 1)


def cut(data: bytearray) -> None:
    del data[-3:]


def fill(base: str, entries: dict[str, FileEntry | None], wanted, verify: str) -> list[Request]:
    reader = StreamReader(base, entries, verify=verify)
    asked = requests({place: t for place, t in wanted.items() if place[1] in reader.keys(place[0])})
    reader.fill(asked)
    return asked


@pytest.mark.parametrize("verify", ["full", "size", "off"])
def test_damaged_tensors_are_all_named(directory, place, tmp_path, verify):
    wanted = expected(directory)
    base = place(copy(directory, tmp_path / f"damaged-{verify}", damaged_tensors))
    entries = {name: entry(directory / name) for name in FILES}
    if verify != "full":
        asked = fill(base, entries, wanted, verify)
        assert sum(raw(r.tensor) != raw(wanted[r.file, r.key]) for r in asked) == 2
        return
    with pytest.raises(IncompleteError, match="2 tensors are not what was saved") as caught:
        fill(base, entries, wanted, verify)
    head = json.loads((directory / FILES[0]).read_bytes()[8:].split(b"}}", 1)[0] + b"}}")
    head.pop("__metadata__", None)
    ordered = sorted(head, key=lambda key: head[key]["data_offsets"])
    for key in (ordered[0], ordered[-1]):
        assert f"{key} in {FILES[0]}" in str(caught.value)


@pytest.mark.parametrize("verify", ["full", "size", "off"])
def test_another_header_is_refused_unless_told_not_to_look(directory, place, tmp_path, verify):
    base = place(copy(directory, tmp_path / f"renamed-{verify}", renamed_key))
    entries = {name: entry(directory / name) for name in FILES}
    if verify == "off":
        assert "t.X" in StreamReader(base, entries, verify=verify).keys(FILES[0])
        return
    with pytest.raises(IncompleteError, match=r"header of .*a\.safetensors is not what was saved"):
        StreamReader(base, entries, verify=verify)


@pytest.mark.parametrize("verify", ["full", "size", "off"])
def test_a_file_that_was_cut_off_is_refused(directory, place, tmp_path, verify):
    base = place(copy(directory, tmp_path / f"cut-{verify}", cut))
    entries = {name: entry(directory / name) for name in FILES}
    with pytest.raises((IncompleteError, FetchError), match=r"a\.safetensors"):
        fill(base, entries, expected(directory), verify)


def test_a_missing_file_is_named(directory, place, tmp_path):
    base = place(copy(directory, tmp_path / "whole", lambda data: None))
    with pytest.raises((IncompleteError, FetchError), match=r"c\.safetensors"):
        StreamReader(base, {"c.safetensors": None})


BOMBS = {
    "huge header": (2**62).to_bytes(8, "little"),
    "no json": (20).to_bytes(8, "little") + b"x" * 20,
    "no object": (2).to_bytes(8, "little") + b"[]",
    "deep": (200_000).to_bytes(8, "little") + b'{"a":' + b"[" * 199_995,
    "offsets": (71).to_bytes(8, "little")
    + b'{"a":{"dtype":"U8","shape":[9],"data_offsets":[0,9223372036854775807]}}',
    "empty file": b"",
}


@pytest.mark.parametrize("known", [True, False])
@pytest.mark.parametrize("bomb", BOMBS)
def test_a_hostile_header_is_refused(place, tmp_path, bomb, known):
    directory = tmp_path / f"bomb-{bomb.replace(' ', '-')}-{known}"
    directory.mkdir()
    (directory / FILES[0]).write_bytes(BOMBS[bomb])
    told = FileEntry(size=len(BOMBS[bomb]), header="0" * 32) if known else None
    with pytest.raises((IncompleteError, FetchError), match=r"a\.safetensors"):
        StreamReader(place(directory), {FILES[0]: told}, verify="off")


# --- the store ---------------------------------------------------------------


def test_one_file_is_pulled_and_none_that_is_named_alike(bucket, tmp_path):
    source = tmp_path / "source"
    (source / "below").mkdir(parents=True)
    for name in ("one.json", "other-one.json", "below/one.json"):
        (source / name).write_text(name)
    base = bucket.put(source, "pulled/[odd]")
    target = tmp_path / "target"
    target.mkdir()
    assert store.pull(base, "one.json", target)
    assert [(p.name, p.read_text()) for p in target.rglob("*")] == [("one.json", "one.json")]
    assert not store.pull(base, "none.json", target)


def test_names_are_those_at_the_prefix_alone(bucket, directory):
    base = bucket.put(directory, "names")
    bucket.put(directory, "names/below")
    assert store.part_names(base) == sorted(FILES)


def test_a_bucket_that_is_not_there_is_named(bucket, tmp_path):
    with pytest.raises(FetchError, match=r"s3://none-such/at/all/sharded_state\.json"):
        store.pull("s3://none-such/at/all", "sharded_state.json", tmp_path)


def test_without_the_streamer_it_is_said_what_to_install(directory, monkeypatch):
    monkeypatch.setitem(__import__("sys").modules, "runai_model_streamer", None)
    with pytest.raises(FetchError, match=r"pip install 'vllm\[runai\]'"):
        StreamReader(str(directory), dict.fromkeys(FILES))
