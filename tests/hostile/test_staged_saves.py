"""A save into a directory that somebody prepared: nothing outside of it is moved, removed or replaced."""

import json
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.support import edit
from vllm_sharded_state.checkpoint import staging
from vllm_sharded_state.errors import SaveError

SAVE_ID = "0123456789abcdef"


def _staged(directory: Path, name: str) -> Path:
    return directory / f".{name}.{SAVE_ID}.tmp"


def _journal(directory: Path, files: list[str], replaced: list[str]) -> None:
    """As of a published save that was killed: the next one completes it."""
    (directory / edit.MANIFEST).write_text(json.dumps({"save_id": SAVE_ID}))
    _staged(directory, "journal").write_text(json.dumps({"files": files, "replaced": replaced}))


def _linked_side_files(directory: Path, outside: Path) -> None:
    _journal(directory, [], [])
    _staged(directory, "side-files").symlink_to(outside)


def _linked_folder(directory: Path, outside: Path) -> None:
    _journal(directory, [], [])
    (directory / "sub").symlink_to(outside)
    (_staged(directory, "side-files") / "sub").mkdir(parents=True)
    (_staged(directory, "side-files") / "sub" / "precious").write_text("forged")


def _removing(directory: Path, outside: Path) -> None:
    _journal(directory, [], ["../outside/precious"])


def _removing_by_full_name(directory: Path, outside: Path) -> None:
    _journal(directory, [], [str(outside / "precious")])


def _bringing(directory: Path, outside: Path) -> None:
    _journal(directory, ["../outside/precious"], [])


def _linked_part(directory: Path, outside: Path) -> None:
    """A staged part that is a link gets its name as what it is."""
    _journal(directory, ["part"], ["old"])
    _staged(directory, "part").symlink_to(outside / "precious")
    (directory / "old").symlink_to(outside / "precious")


PREPARED: dict[str, tuple[Callable[[Path, Path], None], bool]] = {
    "side files that are a link": (_linked_side_files, False),
    "a folder that is a link": (_linked_folder, True),
    "a journal that removes elsewhere": (_removing, True),
    "a journal that removes by full name": (_removing_by_full_name, True),
    "a journal that brings elsewhere": (_bringing, True),
    "parts that are links": (_linked_part, False),
}


@pytest.mark.parametrize("name", PREPARED)
def test_nothing_outside_is_touched(tmp_path: Path, name: str) -> None:
    directory, outside = tmp_path / "saved", tmp_path / "outside"
    directory.mkdir()
    outside.mkdir()
    (outside / "precious").write_text("precious")
    prepare, refused = PREPARED[name]
    prepare(directory, outside)
    if refused:
        with pytest.raises(SaveError, match=r"leads out|outside"):
            staging.complete(directory)
    else:
        staging.complete(directory)
        assert not [path for path in directory.iterdir() if staging.is_staged(path.name)]
    assert [path.name for path in outside.iterdir()] == ["precious"]
    assert (outside / "precious").read_text() == "precious"
    assert not (directory / "precious").exists()


def test_what_a_killed_save_left_is_completed(tmp_path: Path) -> None:
    """The same directory without tricks, so that the refusals above are of the tricks."""
    _journal(tmp_path, ["part"], ["old"])
    _staged(tmp_path, "part").write_text("new")
    (tmp_path / "old").write_text("old")
    (_staged(tmp_path, "side-files") / "sub").mkdir(parents=True)
    (_staged(tmp_path, "side-files") / "sub" / "code.py").write_text("code")
    staging.complete(tmp_path)
    found = {
        str(p.relative_to(tmp_path)): p.read_text() for p in tmp_path.rglob("*") if p.is_file()
    }
    assert found == {
        "part": "new",
        "sub/code.py": "code",
        edit.MANIFEST: json.dumps({"save_id": SAVE_ID}),
    }
