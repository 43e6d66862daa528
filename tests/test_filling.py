"""Reads of a load: tensors ahead of their use, memory that is shared by mistake, progress."""

from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from vllm_sharded_state import filling, options, progress
from vllm_sharded_state.checkpoint.reading import PartReader, Request
from vllm_sharded_state.errors import OptionError, RestoreError
from vllm_sharded_state.filling import Filling, Origin

TENSORS = {f"t{index}": torch.arange(100.0) + index for index in range(20)}


class Counting(PartReader):
    """A reader that notes what it was asked for."""

    def __init__(self, directory: Path) -> None:
        save_file(TENSORS, directory / "a.safetensors")
        super().__init__(directory, {"a.safetensors": None})
        self.asked: list[list[str]] = []

    def fill(self, requests, progress=None):  # type: ignore[no-untyped-def]
        requests = list(requests)
        self.asked.append([request.key for request in requests])
        super().fill(requests, progress)


def _origin(path: str) -> Origin:
    return ("a.safetensors", path, None)


def test_tensors_are_read_ahead_up_to_a_limit(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(filling, "AHEAD", 1000)  # two of 400 bytes, not three
    reader = Counting(tmp_path)
    read = Filling(reader, _origin).ahead(list(TENSORS))
    for path, tensor in TENSORS.items():
        assert torch.equal(read(path), tensor)
    assert [len(keys) for keys in reader.asked] == [2] * 10
    for path in ("t9", "t2", "t2", "t19"):  # out of order costs, but gives the same
        assert torch.equal(read(path), TENSORS[path])


def test_a_tensor_above_the_limit_is_read_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(filling, "AHEAD", 10)
    reader = Counting(tmp_path)
    read = Filling(reader, _origin).ahead(list(TENSORS))
    assert torch.equal(read("t0"), TENSORS["t0"])
    assert reader.asked == [["t0"]]


def test_fetching_reads_all_at_once(tmp_path: Path) -> None:
    reader = Counting(tmp_path)
    found = Filling(reader, _origin).fetch(["t3", "t1"], torch.device("cpu"))
    assert list(found) == ["t3", "t1"]
    assert all(torch.equal(tensor, TENSORS[path]) for path, tensor in found.items())
    assert reader.asked == [["t3", "t1"]]


def test_tensors_saved_apart_may_not_overwrite_each_other(tmp_path: Path) -> None:
    fill = Filling(Counting(tmp_path), _origin)
    memory = torch.zeros(199)
    apart = [("t1", memory[:100]), ("t2", memory[99:])]
    fill.fill(apart)
    assert memory[99] == TENSORS["t2"][0]
    with pytest.raises(
        RestoreError, match="share memory in this model, and differ:\n  t1\n"
    ) as caught:
        fill.refuse_overwritten(apart)
    assert "t2" not in str(caught.value)


def test_equal_bytes_and_neighbours_in_one_storage_are_no_loss(tmp_path: Path) -> None:
    reader = Counting(tmp_path)
    fill = Filling(reader, _origin)
    memory = torch.zeros(200)
    neighbours = [("t1", memory[:100]), ("t2", memory[100:])]
    fill.fill(neighbours)
    fill.refuse_overwritten(neighbours)
    assert reader.asked[1:] == [], "neighbours were read again"
    # One saved tensor under two paths is one; t2 from 0 is t1 from 1.
    fill.refuse_overwritten([("t1", memory[:100]), ("t1", memory[:100])])
    assert reader.asked[1:] == []
    line = torch.arange(101.0) + 1
    fill.refuse_overwritten([("t1", line[:100]), ("t2", line[1:])])
    assert [sorted(keys) for keys in reader.asked[1:]] == [["t1", "t2"]]


def test_bytes_are_counted_and_the_bar_shows_each_once(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    lines: list[str] = []
    monkeypatch.setattr(progress.logger, "info", lambda text, *values: lines.append(text % values))
    noted = progress.Progress(4000, use_tqdm=True)
    fill = Filling(Counting(tmp_path), _origin, noted)
    for path in list(TENSORS)[:10] * 2:  # twice, so that more is read than there is
        fill.fill([(path, torch.zeros(100))])
    noted.close()
    noted.close()
    noted.report()
    bar = capsys.readouterr().err.strip().splitlines()
    assert bar[0].startswith("Loading sharded state:   0% Completed | 0.00/3.91k [")
    assert bar[-1].startswith("Loading sharded state: 100% Completed | 3.91k/3.91k [")
    assert len(lines) == 1
    assert lines[0].startswith("Loading weights took ")
    assert "seconds (0.00 GiB, " in lines[0]
    assert noted._bytes == 8000


def test_no_bar_where_the_engine_wants_none(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    noted = progress.Progress(400, use_tqdm=False)
    Filling(Counting(tmp_path), _origin, noted).fill([("t0", torch.zeros(100))])
    noted.close()
    assert capsys.readouterr().err == ""
    assert noted._bytes == 400


def test_a_bar_of_a_load_that_failed_is_closed(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    noted = progress.Progress(400, use_tqdm=True)
    fill = Filling(Counting(tmp_path), lambda path: ("a.safetensors", path, "0" * 32), noted)
    with pytest.raises(ValueError, match="not what was saved"):
        fill.fill([("t0", torch.zeros(100))])
    noted.close()
    assert "Loading sharded state" in capsys.readouterr().err


class _LoadConfig:
    load_format = "sharded_state"

    def __init__(self, **extra: object) -> None:
        self.model_loader_extra_config = extra


@pytest.mark.parametrize("value", ["full", "size", "off"])
def test_verify_is_taken_out_of_the_extra_config(value: str) -> None:
    stripped, taken = options.take(_LoadConfig(verify=value, pattern="x"))
    assert taken.verify == value
    assert stripped.model_loader_extra_config == {"pattern": "x"}
    assert options.take(_LoadConfig())[1].verify == "full"


@pytest.mark.parametrize("value", ["none", "FULL", "", True, None, 0, ["full"], {}])
def test_another_verify_is_refused(value: object) -> None:
    with pytest.raises(OptionError, match=r"verify is .* set it to one of: full, size, off"):
        options.take(_LoadConfig(verify=value))


def test_requests_hold_what_they_were_given() -> None:
    tensor = torch.zeros(2)
    request = Request("f", "k", None, tensor)
    assert (request.file, request.key, request.checksum) == ("f", "k", None)
    assert request.tensor is tensor
