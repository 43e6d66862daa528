"""Files that are not what was saved: each `verify` finds what it promises, and says what and where."""

import errno
import json
import os
import socket
import struct
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

from vllm_sharded_state.checkpoint import files, jobs, pool
from vllm_sharded_state.checkpoint.checksum import checksum
from vllm_sharded_state.checkpoint.manifest import FileEntry
from vllm_sharded_state.checkpoint.reading import VERIFY, PartReader, Request
from vllm_sharded_state.errors import IncompleteError

NAME = "a.safetensors"
TENSORS = {f"t{index:02}": torch.arange(index, index + 50.0) for index in range(30)}
TENSORS["large"] = torch.arange(800_000.0)


def _checksum(tensor: torch.Tensor) -> str:
    return checksum(tensor.view(torch.uint8).numpy().tobytes())


def _begin(data: bytes) -> int:
    return 8 + struct.unpack("<Q", data[:8])[0]


@pytest.fixture
def whole(tmp_path: Path) -> bytes:
    save_file(TENSORS, tmp_path / NAME)
    return (tmp_path / NAME).read_bytes()


def _read(directory: Path, whole: bytes, verify: str) -> dict[str, torch.Tensor]:
    entry = FileEntry(size=len(whole), header=checksum(whole[: _begin(whole)]))
    reader = PartReader(directory, {NAME: entry}, verify=verify)
    places = {key: torch.zeros_like(tensor) for key, tensor in TENSORS.items()}
    reader.fill([Request(NAME, key, _checksum(TENSORS[key]), t) for key, t in places.items()])
    return places


def _position(data: bytes, key: str) -> int:
    return _begin(data) + json.loads(data[8 : _begin(data)])[key]["data_offsets"][0]


def _flip(data: bytes, position: int) -> bytes:
    return data[:position] + bytes([data[position] ^ 1]) + data[position + 1 :]


def _swap(data: bytes) -> bytes:
    """Two keys of one form change places in the header: their tensors are exchanged."""
    head = data[: _begin(data)].replace(b'"t03"', b'"???"').replace(b'"t04"', b'"t03"')
    return head.replace(b'"???"', b'"t04"') + data[_begin(data) :]


#: What happened to the file, and the modes of `verify` that find it, with the words they say it in.
DAMAGE: dict[str, tuple[Callable[[bytes], bytes], dict[str, str]]] = {
    "none": (lambda data: data, {}),
    "one byte less": (
        lambda data: data[:-1],
        {"full": "were written", "size": "were written", "off": "lies outside of the file"},
    ),
    "one byte more": (
        lambda data: data + b"\0",
        {"full": "were written", "size": "were written", "off": "its tensors end at"},
    ),
    "empty": (
        lambda data: b"",
        {"full": "were written", "size": "were written", "off": "it has only 0 bytes"},
    ),
    "all zeros": (
        lambda data: b"\0" * len(data),
        {
            "full": "The header of .* is not what was saved",
            "size": "The header of .* is not what was saved",
            "off": "no JSON object",
        },
    ),
    "a header with other spaces": (
        lambda data: data[: _begin(data) - 1] + b"\t" + data[_begin(data) :],
        {"full": "The header of", "size": "The header of"},
    ),
    "exchanged keys": (_swap, {"full": "The header of", "size": "The header of"}),
    "zeros from the middle": (
        lambda data: data[: len(data) // 2] + b"\0" * (len(data) - len(data) // 2),
        {"full": "tensors are not what was saved"},
    ),
    "a bit of the first byte": (
        lambda data: _flip(data, _begin(data)),
        {"full": "1 tensor is not what was saved"},
    ),
    "a bit of the last byte": (
        lambda data: _flip(data, len(data) - 1),
        {"full": "1 tensor is not what was saved"},
    ),
}


@pytest.mark.parametrize("verify", VERIFY)
@pytest.mark.parametrize("damage", DAMAGE)
def test_each_mode_finds_what_it_promises(
    tmp_path: Path, whole: bytes, damage: str, verify: str
) -> None:
    change, found = DAMAGE[damage]
    (tmp_path / NAME).write_bytes(change(whole))
    if verify in found:
        with pytest.raises(IncompleteError, match=found[verify]) as caught:
            _read(tmp_path, whole, verify)
        assert NAME in str(caught.value)
    else:
        read = _read(tmp_path, whole, verify)
        same = all(torch.equal(read[key], TENSORS[key]) for key in TENSORS)
        assert same == (damage in ("none", "a header with other spaces"))


@pytest.mark.parametrize("threads", [1, 3])
def test_every_damaged_tensor_is_named_and_no_other(
    tmp_path: Path, whole: bytes, threads: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(pool, "threads", lambda: threads)
    damaged = ["t29", "large", "t03", "t00"]
    data = whole
    for key in damaged:
        data = _flip(data, _position(whole, key) + 20)
    (tmp_path / NAME).write_bytes(data)
    with pytest.raises(IncompleteError) as caught:
        _read(tmp_path, whole, "full")
    lines = str(caught.value).splitlines()
    assert lines[0].startswith(f"4 tensors are not what was saved in {tmp_path}")
    assert [line.split()[0] for line in lines[1:-1]] == sorted(damaged)


def test_a_checksum_of_nothing_is_compared_too(tmp_path: Path) -> None:
    save_file({"empty": torch.empty(0)}, tmp_path / NAME)
    reader = PartReader(tmp_path, {NAME: None})
    assert reader.verified(NAME, "empty", checksum(b"")).numel() == 0
    with pytest.raises(IncompleteError, match=r"empty in a\.safetensors"):
        reader.verified(NAME, "empty", checksum(b"x"))


def _preadv(stand_in: Callable[..., int], monkeypatch: pytest.MonkeyPatch) -> None:
    """A stand-in for the system call: no disk here fails, or gives less than it was asked for."""
    real = os.preadv

    def call(descriptor: int, buffers: Sequence[Any], offset: int) -> int:
        return stand_in(real, descriptor, buffers, offset)

    monkeypatch.setattr(files.os, "preadv", call)


def test_reads_that_give_less_than_asked_are_continued(
    tmp_path: Path, whole: bytes, monkeypatch: pytest.MonkeyPatch
) -> None:
    def short(real: Any, descriptor: int, buffers: Sequence[Any], offset: int) -> int:
        limit, part = 7001, []
        for buffer in buffers:
            part.append(buffer[:limit])
            limit -= len(part[-1])
            if not limit:
                break
        return real(descriptor, part, offset)

    _preadv(short, monkeypatch)
    read = _read(tmp_path, whole, "full")
    assert all(torch.equal(read[key], TENSORS[key]) for key in TENSORS)


@pytest.mark.parametrize("verify", VERIFY)
@pytest.mark.parametrize("threads", [1, 3])
def test_a_disk_that_fails_is_told_with_file_tensor_and_cause(
    tmp_path: Path, whole: bytes, verify: str, threads: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    begin = _position(whole, "large")

    def fail(real: Any, descriptor: int, buffers: Sequence[Any], offset: int) -> int:
        if offset >= begin + jobs.PIECE:
            raise OSError(errno.EIO, os.strerror(errno.EIO))
        return real(descriptor, buffers, offset)

    monkeypatch.setattr(pool, "threads", lambda: threads)
    _preadv(fail, monkeypatch)
    with pytest.raises(
        IncompleteError, match=r"a\.safetensors: .* can't be read: .*Input/output error"
    ):
        _read(tmp_path, whole, verify)


@pytest.mark.parametrize("verify", VERIFY)
def test_a_file_that_is_cut_off_while_it_is_read(tmp_path: Path, whole: bytes, verify: str) -> None:
    entry = FileEntry(size=len(whole), header=checksum(whole[: _begin(whole)]))
    reader = PartReader(tmp_path, {NAME: entry}, verify=verify)
    os.truncate(tmp_path / NAME, len(whole) - 100)
    places = {key: torch.zeros_like(tensor) for key, tensor in TENSORS.items()}
    with pytest.raises(
        IncompleteError, match=r"a\.safetensors ends at byte .*cut off while it was read"
    ):
        reader.fill([Request(NAME, key, _checksum(TENSORS[key]), t) for key, t in places.items()])


def test_a_file_that_is_written_to_while_it_is_read(tmp_path: Path, whole: bytes) -> None:
    reader = PartReader(tmp_path, {NAME: None}, verify="off")
    with open(tmp_path / NAME, "r+b") as file:
        file.seek(len(whole) - 1)
        file.write(b"!")
    os.utime(tmp_path / NAME, ns=(1, 1))
    with pytest.raises(IncompleteError, match=r"a\.safetensors was changed while it was read"):
        reader.get(NAME, "t00")


def test_a_file_that_is_replaced_while_it_is_open_stays_the_old_one(
    tmp_path: Path, whole: bytes
) -> None:
    reader = PartReader(tmp_path, {NAME: FileEntry(len(whole), checksum(whole[: _begin(whole)]))})
    (tmp_path / "new").write_bytes(b"\0" * len(whole))
    os.replace(tmp_path / "new", tmp_path / NAME)
    assert torch.equal(reader.verified(NAME, "t07", _checksum(TENSORS["t07"])), TENSORS["t07"])


def _special(kind: str, path: Path) -> None:
    if kind == "directory":
        path.mkdir()
    elif kind == "fifo":
        os.mkfifo(path)
    elif kind == "socket":
        here = os.getcwd()
        os.chdir(path.parent)  # a socket's path is short
        try:
            socket.socket(socket.AF_UNIX).bind(path.name)
        finally:
            os.chdir(here)
    elif kind == "link to a device":
        path.symlink_to("/dev/zero")
    elif kind == "link to itself":
        path.symlink_to(path)
    else:
        path.symlink_to(path.parent / "gone")


@pytest.mark.parametrize(
    "kind", ["directory", "fifo", "socket", "link to a device", "link to itself", "link to nothing"]
)
def test_only_regular_files_are_opened(tmp_path: Path, kind: str) -> None:
    _special(kind, tmp_path / NAME)
    what = {"link to itself": "can't be opened", "link to nothing": "is missing"}
    with pytest.raises(
        IncompleteError, match=rf"a\.safetensors {what.get(kind, 'is no regular file')}"
    ):
        PartReader(tmp_path, {NAME: None})


def test_a_link_into_a_hub_cache_is_followed(tmp_path: Path, whole: bytes) -> None:
    (tmp_path / "blobs").mkdir()
    (tmp_path / "snapshots" / "x").mkdir(parents=True)
    os.replace(tmp_path / NAME, tmp_path / "blobs" / "0123")
    (tmp_path / "snapshots" / "x" / NAME).symlink_to("../../blobs/0123")
    read = _read(tmp_path / "snapshots" / "x", whole, "full")
    assert all(torch.equal(read[key], TENSORS[key]) for key in TENSORS)


def test_files_are_closed(tmp_path: Path, whole: bytes) -> None:
    def opened() -> int:
        return len(os.listdir("/proc/self/fd"))

    before = opened()
    reader = PartReader(tmp_path, {NAME: None})
    assert opened() == before + 1
    reader.close()
    reader.close()
    assert opened() == before
    for _ in range(3):
        PartReader(tmp_path, {NAME: None})
        (tmp_path / "bad").write_bytes(b"x")
        with pytest.raises(IncompleteError):
            PartReader(tmp_path, {NAME: None, "bad": None})
    assert opened() == before


def test_a_staged_part_is_read_until_it_has_its_name(tmp_path: Path, whole: bytes) -> None:
    save_id = "0123456789abcdef"
    entry = FileEntry(len(whole), checksum(whole[: _begin(whole)]))
    staged = tmp_path / f".{NAME}.{save_id}.tmp"
    os.replace(tmp_path / NAME, staged)
    (tmp_path / NAME).write_bytes(b"of an earlier save")
    for path in (staged, tmp_path / NAME):
        reader = PartReader(tmp_path, {NAME: entry}, save_id)
        assert torch.equal(reader.get(NAME, "t07"), TENSORS["t07"]), path
        if path is staged:
            os.replace(staged, tmp_path / NAME)
