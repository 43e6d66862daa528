"""A save that is killed, or refused by the file system, at any operation: the old or the new, whole."""

import errno
import functools
import json
import os
import resource
import shutil
import signal
from pathlib import Path
from typing import Any

import pytest
from safetensors.torch import save_file

from tests.support import crashes
from tests.support.crashes import Tensors, as_stock, equal, names, part_of, through_manifest
from vllm_sharded_state.checkpoint import manifest, staging
from vllm_sharded_state.checkpoint.reading import PartReader
from vllm_sharded_state.errors import SaveError

OLD, NEW, NEXT = crashes.make(1), crashes.make(2), crashes.make(3)
#: A part for each tensor, nearly; and one part for all.
SMALL, ONE = 600, None

#: What lies at the path before, and how the new checkpoint is cut into parts.
CASES = {
    "nothing, one part": (None, ONE),
    "nothing, parts": (None, SMALL),
    "one part, parts": (ONE, SMALL),
    "parts, fewer": (SMALL, 1200),
    "parts, one": (SMALL, ONE),
    "stock's parts, parts": ("stock", SMALL),
}


class Case:
    """A directory with an earlier checkpoint, or none, to be copied for every point."""

    def __init__(self, name: str, root: Path) -> None:
        before, self.max_size = CASES[name]
        self.root = root
        self.old: Tensors | None = None if name.startswith("nothing") else OLD
        self.has_manifest = not name.startswith(("nothing", "stock"))
        self.new_model = crashes.source(root / "new", "of the new model")
        self._old_model = crashes.source(root / "old", "of the old model")
        self._before = root / "before"
        self._before.mkdir()
        if before == "stock":
            for index, key in enumerate(OLD):
                save_file({key: OLD[key]}, self._before / crashes.part_name(index))
            shutil.copy(self._old_model / "config.json", self._before)
        elif self.old is not None:
            crashes.save(self._before, OLD, self._old_model, before)
        self._count = 0

    def place(self) -> Path:
        """A fresh copy."""
        self._count += 1
        return Path(shutil.copytree(self._before, self.root / f"point-{self._count}"))

    def save(self, directory: Path) -> None:
        crashes.save(directory, NEW, self.new_model, self.max_size)

    def operations(self) -> list[tuple[str, str]]:
        """Those of a save that nothing disturbs."""
        directory = self.place()
        watched = crashes.Operations(lambda *_: None)
        with watched.active():
            self.save(directory)
        self.files = names(directory)
        return watched.log

    def check(self, directory: Path, published: bool) -> None:
        """The directory holds exactly the old or the new, and the next save is as if nothing had been."""
        found = through_manifest(directory)
        assert equal(found, NEW if published else (self.old if self.has_manifest else None))
        assert _verified(directory) == (found is not None)
        stock = as_stock(directory)
        assert part_of(stock, self.old or {}) or part_of(stock, NEW), "a mixture of two saves"
        if not published and self.old is not None:
            assert equal(stock, self.old), "the earlier checkpoint was damaged"
        self._check_side_files(directory, published)
        before = names(directory)
        if published and self._count % 2:  # else the next save does that
            staging.complete(directory)
            assert equal(through_manifest(directory), NEW)
            assert equal(as_stock(directory), NEW)
            assert names(directory) == self.files
        crashes.save(directory, NEXT, self.new_model, self.max_size)
        assert equal(through_manifest(directory), NEXT)
        assert equal(as_stock(directory), NEXT)
        assert names(directory) == self.files, f"left behind, after {sorted(before)}"
        shutil.rmtree(directory)

    def _check_side_files(self, directory: Path, published: bool) -> None:
        found = manifest.read(directory)
        waiting = staging.waiting_side_files(directory, found.save_id) if found else []
        for name in ("config.json", "code/model.py"):
            path = directory / name
            text = path.read_text() if path.exists() else None
            new = (self.new_model / name).read_text()
            assert (text == new) == (published and name not in waiting)
            assert text in (None, new, f"{name} of the old model")


def _verified(directory: Path) -> bool:
    """Read everything as a load does; whether there was a manifest."""
    found = manifest.read(directory)
    if found is None:
        return False
    entry = found.rank(0)
    reader = PartReader(directory, dict(entry.files), found.save_id)
    for tensor in entry.tensors.values():
        reader.verified(tensor.file, tensor.key, tensor.checksum)
    return True


@pytest.fixture(params=CASES)
def case(request: pytest.FixtureRequest, tmp_path: Path) -> Case:
    return Case(request.param, tmp_path)


@pytest.fixture(autouse=True)
def _no_fsync(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing here pulls the plug."""
    monkeypatch.setattr(os, "fsync", lambda fd: None)


def _published(log: list[tuple[str, str]]) -> int:
    return next(i for i, (_, path) in enumerate(log) if path.endswith("/sharded_state.json"))


def test_killed_before_and_within_every_operation(case: Case) -> None:
    log = case.operations()
    commit = _published(log)
    points: list[tuple[int, int | None]] = []
    for index, (name, _) in enumerate(log):
        if name not in crashes.NO_CHANGE:
            points.append((index, None))
        if name in crashes.WRITES:
            points.append((index, 511))
    assert len(points) > 35, "with six cases, more than 200"
    for index, part in points:
        seen: list[int] = []

        def at(
            now: int,
            name: str,
            args: Any,
            index: int = index,
            part: int | None = part,
            seen: list[int] = seen,
        ) -> int | None:
            if now != index:
                return None
            if part is None or seen:
                crashes.die()
            seen.append(now)
            return part

        directory = case.place()
        assert crashes.killed(at, functools.partial(case.save, directory)), log[index]
        try:
            case.check(directory, published=index > commit)
        except AssertionError as error:
            raise AssertionError(f"killed at {index}, {log[index]}, after {part} bytes") from error


def test_killed_while_completing_a_killed_save(tmp_path: Path) -> None:
    """Completing is interrupted as well, at every operation, and by the next but one completed."""
    case = Case("parts, fewer", tmp_path)
    log = case.operations()
    first = _published(log) + 2
    done = 0
    ended = crashes.Operations(lambda *_: None)
    directory = case.place()
    crashes.killed(
        lambda now, *_: crashes.die() if now == first else None, lambda: case.save(directory)
    )
    with ended.active():
        staging.complete(directory)
    assert names(directory) == case.files
    for index, (name, _) in enumerate(ended.log):
        if name in crashes.NO_CHANGE:
            continue
        directory = case.place()
        assert crashes.killed(
            lambda now, *_: crashes.die() if now == first else None,
            functools.partial(case.save, directory),
        )
        assert crashes.killed(
            lambda now, *_, i=index: crashes.die() if now == i else None,
            functools.partial(staging.complete, directory),
        )
        case.check(directory, published=True)
        done += 1
    assert done > 15


ERRORS = (errno.ENOSPC, errno.EDQUOT, errno.EROFS, errno.EIO, errno.EFBIG)


@pytest.mark.parametrize(
    ("name", "lasting"),
    [
        ("nothing, parts", False),
        ("one part, parts", False),
        ("one part, parts", True),
        ("parts, fewer", False),
        ("stock's parts, parts", True),
    ],
)
def test_refused_at_every_operation(tmp_path: Path, name: str, lasting: bool) -> None:
    """`lasting`: whatever changes the directory fails from then on, as when it becomes read-only."""
    case = Case(name, tmp_path)
    log = case.operations()
    commit = _published(log)
    told = 0
    for index, (name, path) in enumerate(log):
        number = errno.ENOLCK if name == "flock" else ERRORS[index % len(ERRORS)]

        def at(now: int, name: str, args: Any, i: int = index, number: int = number) -> None:
            if now == i or (lasting and now > i and name not in ("flock", "close")):
                raise OSError(number, os.strerror(number))

        directory = case.place()
        text = _refusal(case, directory, at)
        if text is None:
            # Nothing is lost without a lock, nor when a directory could not be made that is there.
            assert name in ("flock", "mkdir") or path.endswith(".lock") or index > commit, (
                name,
                path,
            )
        else:
            told += 1
            assert str(directory) in text
            assert os.strerror(number) in text
            assert ("holds the new checkpoint" in text) == (index > commit), (name, path)
        case.check(directory, published=through_manifest_is_new(directory))
    assert told > len(log) // 2


def _refusal(case: Case, directory: Path, at: Any) -> str | None:
    try:
        with crashes.Operations(at).active():
            case.save(directory)
    except SaveError as error:
        return str(error)
    return None


def through_manifest_is_new(directory: Path) -> bool:
    return equal(through_manifest(directory), NEW)


def test_each_error_at_the_writes_of_one_save(tmp_path: Path) -> None:
    case = Case("one part, parts", tmp_path)
    writes = [i for i, (name, _) in enumerate(case.operations()) if name in crashes.WRITES]
    for number in ERRORS:
        for index in writes:

            def at(now: int, name: str, args: Any, i: int = index, number: int = number) -> None:
                if now == i:
                    raise OSError(number, os.strerror(number))

            directory = case.place()
            with (
                crashes.Operations(at).active(),
                pytest.raises(SaveError, match=os.strerror(number)),
            ):
                case.save(directory)
            case.check(directory, published=False)


@pytest.mark.parametrize("limit", [100, 5000, 5300, 5700])
def test_a_real_limit_on_file_sizes(tmp_path: Path, limit: int) -> None:
    case = Case("parts, one", tmp_path)
    case.operations()
    directory = case.place()
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    previous = signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_FSIZE, (limit, before[1]))
    try:
        with pytest.raises(SaveError, match="File too large"):
            case.save(directory)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
        signal.signal(signal.SIGXFSZ, previous)
    case.check(directory, published=False)


def test_a_place_that_is_no_directory(tmp_path: Path) -> None:
    case = Case("nothing, one part", tmp_path)
    (tmp_path / "file").write_text("mine")
    for path in (tmp_path / "file", tmp_path / "file" / "below"):
        with pytest.raises(SaveError, match=str(path)):
            case.save(path)
    assert (tmp_path / "file").read_text() == "mine"


def test_a_manifest_that_is_a_directory_is_left_alone(tmp_path: Path) -> None:
    case = Case("nothing, one part", tmp_path)
    directory = case.place()
    (directory / "sharded_state.json").mkdir()
    with pytest.raises(SaveError, match="Is a directory"):
        case.save(directory)
    assert names(directory) == {"sharded_state.json"}


def test_a_journal_that_no_save_wrote_removes_nothing(tmp_path: Path) -> None:
    case = Case("parts, one", tmp_path)
    directory = case.place()
    outside = tmp_path / "outside"
    outside.write_text("mine")
    save_id = staging.published_id(directory)
    assert save_id is not None
    journal = directory / f".journal.{save_id}.tmp"
    for content in ({"files": [], "replaced": ["../outside"]}, {"files": []}, "[" * 100_000):
        journal.write_text(content if isinstance(content, str) else json.dumps(content))
        with pytest.raises(SaveError, match=r"save wrote that|damaged"):
            case.save(directory)
    assert outside.read_text() == "mine"
    assert equal(through_manifest(directory), OLD)


def test_a_pipe_in_the_place_of_a_file_is_not_waited_for(tmp_path: Path) -> None:
    case = Case("one part, parts", tmp_path)
    directory = case.place()
    save_id = staging.published_id(directory)
    assert save_id is not None
    os.mkfifo(directory / f".journal.{save_id}.tmp")
    assert staging.waiting_removal(directory, save_id) == set()
    with pytest.raises(SaveError, match="no file that a save wrote"):
        case.save(directory)
    (directory / "sharded_state.json").unlink()
    os.mkfifo(directory / "sharded_state.json")
    case.save(directory)
    assert equal(through_manifest(directory), NEW)


def test_what_is_not_ours_stays(tmp_path: Path) -> None:
    """Notes, parts under other names and hidden files are no concern of a save."""
    case = Case("parts, one", tmp_path)
    directory = case.place()
    mine = {"notes.txt", "model-rank-1-part-0.safetensors", ".hidden.tmp", "x.0123.tmp"}
    for name in mine:
        (directory / name).write_text(name)
    case.save(directory)
    assert all((directory / name).read_text() == name for name in mine)


def test_parts_of_ranks_that_are_gone_go(tmp_path: Path) -> None:
    """Four ranks were saved there before, one is now: what the earlier manifest lists is removed."""
    case = Case("parts, one", tmp_path)
    directory = case.place()
    data = json.loads((directory / "sharded_state.json").read_text())
    gone = "model-rank-3-part-0.safetensors"
    data["ranks"].append({"rank": 3, "files": {gone: {"size": 1, "header": ""}}})
    (directory / "sharded_state.json").write_text(json.dumps(data))
    (directory / gone).write_text("x")
    case.save(directory)
    assert gone not in names(directory)
    assert equal(as_stock(directory), NEW)


def test_a_staged_file_is_found_until_it_has_its_name(tmp_path: Path) -> None:
    save_id = staging.new_id()
    early = staging.staged(tmp_path, "part", save_id)
    assert staging.locate(tmp_path, "part", save_id) == tmp_path / "part"
    early.write_text("new")
    (tmp_path / "part").write_text("old")
    assert staging.locate(tmp_path, "part", save_id) == early
    staging.place(tmp_path, save_id, ["part"], [])
    assert staging.locate(tmp_path, "part", save_id) == tmp_path / "part"
    assert (tmp_path / "part").read_text() == "new"
