"""Two savers at one path, and one save by two ranks: real processes, forked; real gloo between ranks."""

import errno
import json
import os
import signal
import time
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import distributed as dist

from tests.support import crashes
from tests.support.crashes import equal, names, through_manifest
from vllm_sharded_state.checkpoint import lock, manifest, staging, transaction, writing
from vllm_sharded_state.checkpoint.lock import SaveLock
from vllm_sharded_state.checkpoint.manifest import RankEntry, TensorEntry, UnitEntry
from vllm_sharded_state.checkpoint.ranks import GroupRanks
from vllm_sharded_state.checkpoint.transaction import Written
from vllm_sharded_state.errors import SaveError

OLD, NEW = crashes.make(1), crashes.make(2)


def _fork(work: Callable[[], None]) -> int:
    child = os.fork()
    if child == 0:
        code = 1
        try:
            work()
            code = 0
        finally:
            os._exit(code)
    return child


def _wait(path: Path) -> None:
    until = time.monotonic() + 30
    while not path.exists():
        assert time.monotonic() < until, f"{path} never came"
        time.sleep(0.005)


@pytest.fixture
def model(tmp_path: Path) -> Path:
    return crashes.source(tmp_path / "model", "text")


@pytest.mark.parametrize("earlier", [False, True])
def test_the_second_of_two_savers_says_who_is_first_and_changes_nothing(
    tmp_path: Path, model: Path, earlier: bool
) -> None:
    directory, reached, go = tmp_path / "saved", tmp_path / "reached", tmp_path / "go"
    directory.mkdir()
    if earlier:
        crashes.save(directory, OLD, model)

    def first() -> None:
        def at(index: int, name: str, args: Any) -> None:
            # In the midst of its first part; the lock's file is written at the beginning.
            if name == "pwrite" and args[2] >= 4096 and not reached.exists():
                reached.write_text("")
                _wait(go)

        with crashes.Operations(at).active():
            crashes.save(directory, NEW, model, 600)

    child = _fork(first)
    _wait(reached)
    before = names(directory)
    with pytest.raises(SaveError, match=rf"Another save .* is running \(process {child} on "):
        crashes.save(directory, crashes.make(3), model)
    with pytest.raises(SaveError, match="Another save"):
        staging.complete(directory)
    assert names(directory) == before
    go.write_text("")
    assert os.waitpid(child, 0)[1] == 0
    assert equal(through_manifest(directory), NEW)
    crashes.save(directory, OLD, model)
    assert equal(through_manifest(directory), OLD)
    assert lock.FILE_NAME not in names(directory)


def test_a_killed_saver_holds_no_lock(tmp_path: Path, model: Path) -> None:
    directory = tmp_path / "saved"
    assert crashes.killed(
        lambda _, name, __: crashes.die() if name == "pwrite" else None,
        lambda: crashes.save(directory, NEW, model),
    )
    assert lock.FILE_NAME in names(directory)
    crashes.save(directory, OLD, model)
    assert equal(through_manifest(directory), OLD)


def test_the_lock_is_held_until_the_last_rank_has_ended(tmp_path: Path) -> None:
    first, other, stranger = SaveLock(tmp_path), SaveLock(tmp_path), SaveLock(tmp_path)
    first.take()
    with pytest.raises(SaveError, match="Another save"):
        other.share()
    first.share()
    other.share()
    first.release(remove=False)
    with pytest.raises(SaveError, match="Another save"):
        stranger.take()
    other.release(remove=False)
    stranger.take()
    assert stranger.is_held


def test_a_lock_whose_file_was_removed_meanwhile_is_no_lock(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The holder removes the file between another's opening and locking it."""
    first, second, third = SaveLock(tmp_path), SaveLock(tmp_path), SaveLock(tmp_path)
    first.take()
    real = os.open

    def late(path: Any, flags: int, mode: int = 0o777) -> int:
        fd = real(path, flags, mode)
        first.release(remove=True)
        return fd

    monkeypatch.setattr(os, "open", late)
    second.take()
    monkeypatch.setattr(os, "open", real)
    with pytest.raises(SaveError, match="Another save"):
        third.take()


def test_without_locks_a_save_warns_and_removes_nothing_of_others(
    tmp_path: Path, model: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """As on a file system without `flock`, which this machine lacks: ENOLCK."""

    def flock(fd: int, kind: int) -> None:
        raise OSError(errno.ENOLCK, os.strerror(errno.ENOLCK))

    monkeypatch.setattr(lock.fcntl, "flock", flock)
    alive = staging.staged(tmp_path, "model-rank-0-part-0.safetensors", staging.new_id())
    alive.write_text("of a save that may be running")
    monkeypatch.setattr(lock.logger, "propagate", True)
    with caplog.at_level("WARNING", logger=lock.logger.name):
        caplog.handler.setLevel("WARNING")
        lock.logger.addHandler(caplog.handler)
        crashes.save(tmp_path, NEW, model)
        lock.logger.removeHandler(caplog.handler)
    assert "file system without locks" in caplog.text
    assert alive.exists()
    assert equal(through_manifest(tmp_path), NEW)


# One save by two ranks.


def _rank(root: Path, rank: int, fault: str | None) -> None:
    """One rank of a save into `root/saved`, with a fault; tells how it ended in `root/RANK.json`."""
    os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    dist.init_process_group(
        "gloo", f"file://{root / 'meeting'}", rank=rank, world_size=2, timeout=timedelta(seconds=20)
    )
    directory = root / "saved"

    def name(part: Any) -> str:
        return f"model-rank-{rank}-part-{part}.safetensors"

    def write(save_id: str) -> Written:
        writer = writing.PartWriter(directory, name, None, 4000, save_id)
        file, checksum = writer.add("w", torch.tensor([rank, 7]))
        if fault == f"full {rank}":
            raise OSError(errno.ENOSPC, "No space left on device")
        if fault == f"bug {rank}":
            raise RuntimeError("a bug")
        if fault == f"killed {rank}":
            crashes.die()
        writer.close()
        units = {"": UnitEntry("source", None)}
        entry = RankEntry(rank, files=writer.files, units=units)
        entry.tensors["w"] = TensorEntry(file, "w", "parameter", "I64", [2], "source", checksum)
        return Written(entry, set(writer.files), {name(0)})

    def at(index: int, operation: str, args: Any) -> None:
        if operation == "rename" and str(args[1]).endswith(fault_at):
            if fault == "killed after publishing":
                crashes.die()
            raise OSError(errno.EIO, "Input/output error")

    places = {
        ("published 0", 0): "sharded_state.json",
        ("placed 1", 1): name(0),
        ("killed after publishing", 0): name(0),
    }
    fault_at = places.get((fault or "", rank), "none")
    began = time.monotonic()
    told = None
    try:
        with crashes.Operations(at).active():
            transaction.replace(directory, GroupRanks(dist.group.WORLD), write, crashes.describe)
    except (SaveError, RuntimeError) as error:
        told = f"{type(error).__name__}: {error}"
    (root / f"{rank}.json").write_text(json.dumps([told, time.monotonic() - began]))


def _run(root: Path, fault: str | None) -> list[str | None]:
    """What each rank said, or `killed`."""
    children = []
    for rank in range(2):
        children.append(_fork(lambda rank=rank: _rank(root, rank, fault)))
    said: list[str | None] = []
    for rank, child in enumerate(children):
        _, status = os.waitpid(child, 0)
        if os.WIFSIGNALED(status):
            assert os.WTERMSIG(status) == signal.SIGKILL
            said.append("killed")
            continue
        assert status == 0
        told, seconds = json.loads((root / f"{rank}.json").read_text())
        assert seconds < 15, "waited for a rank that had ended"
        said.append(told)
    return said


def _values(directory: Path) -> list[list[int]] | None:
    """What each rank's part holds, found as a load would."""
    found = manifest.read(directory)
    if found is None:
        return None
    tensors = []
    for entry in found.ranks:
        (name,) = entry.files
        path = staging.locate(directory, name, found.save_id)
        tensors.append(crashes.load_file(path)["w"].tolist())
    return tensors


FILES = {"sharded_state.json", *(f"model-rank-{rank}-part-0.safetensors" for rank in range(2))}


def test_two_ranks_save(tmp_path: Path) -> None:
    assert _run(tmp_path, None) == [None, None]
    assert _values(tmp_path / "saved") == [[0, 7], [1, 7]]
    assert names(tmp_path / "saved") == FILES


@pytest.mark.parametrize("fault", ["full 0", "full 1", "bug 1", "published 0"])
def test_when_one_rank_fails_none_publishes_and_the_other_names_it(
    tmp_path: Path, fault: str
) -> None:
    said = _run(tmp_path, fault)
    failing = int(fault[-1])
    words = {"full": "No space left", "bug": "a bug", "published": "Input/output error"}
    own, other = said[failing], said[1 - failing]
    assert own is not None
    assert other is not None
    assert words[fault.split()[0]] in own
    assert f"rank {failing}: " in other
    assert words[fault.split()[0]] in other
    assert names(tmp_path / "saved") == set()


def test_when_a_rank_is_killed_the_other_names_it(tmp_path: Path) -> None:
    for rank in range(2):
        root = tmp_path / str(rank)
        root.mkdir()
        said = _run(root, f"killed {rank}")
        other = said[1 - rank]
        assert said[rank] == "killed"
        assert other is not None
        assert f"rank {rank} (process " in other
        assert _values(root / "saved") is None
        (root / "meeting").unlink()
        assert _run(root, None) == [None, None]
        assert names(root / "saved") == FILES


@pytest.mark.parametrize("fault", ["killed after publishing", "placed 1"])
def test_what_is_published_loads_and_the_next_save_completes_it(tmp_path: Path, fault: str) -> None:
    said = _run(tmp_path, fault)
    assert said[1] is not None
    assert said[0] == "killed" or "holds the new checkpoint" in str(said[0])
    assert ("rank 0 (process" if said[0] == "killed" else "rank 1: ") in f"{said[1]} {said[0]}"
    assert _values(tmp_path / "saved") == [[0, 7], [1, 7]]
    assert names(tmp_path / "saved") > {"sharded_state.json"}
    staging.complete(tmp_path / "saved")
    assert names(tmp_path / "saved") == FILES
    assert _values(tmp_path / "saved") == [[0, 7], [1, 7]]
