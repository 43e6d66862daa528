"""Files beside the weights: which are taken, from where, and that what is there stays."""

import os
from pathlib import Path

import pytest
from xxhash import xxh3_128

from vllm_sharded_state import sidefiles
from vllm_sharded_state.checkpoint import lock, staging

ID = "0123456789abcdef"


def _stage(model: Path | None, tokenizer: Path | None, target: Path) -> dict[str, tuple[int, str]]:
    target.mkdir(exist_ok=True)
    found = sidefiles.stage(model, tokenizer, target, ID)
    staging.place_side_files(target, ID)
    return found


def _texts(root: Path) -> dict[str, str]:
    return {str(p.relative_to(root)): p.read_text() for p in root.rglob("*") if p.is_file()}


def test_all_but_weights_is_taken_and_links_are_resolved(tmp_path: Path) -> None:
    source, target, blob = tmp_path / "source", tmp_path / "target", tmp_path / "blob"
    wanted = {"config.json": "c", "chat_template.jinja": "t", "sub/deep/code.py": "p"}
    for name, text in {
        **wanted,
        "model.safetensors": "w",
        "x.bin": "w",
        "model.safetensors.index.json": "{}",
        "sharded_state.json": "{}",
        ".git/config": "g",
        lock.FILE_NAME: "l",
        f".part.{ID}.tmp": "s",
        f".side-files.{ID}.tmp/config.json": "s",
    }.items():
        path = source / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    blob.write_text("linked")
    (source / "tokenizer.json").symlink_to(blob)
    found = _stage(source, None, target)
    wanted["tokenizer.json"] = "linked"
    assert _texts(target) == wanted
    assert not (target / "tokenizer.json").is_symlink()
    assert found == {
        name: (len(text), xxh3_128(text.encode()).hexdigest()) for name, text in wanted.items()
    }


def test_the_tokenizer_is_its_own_and_the_config_the_models(tmp_path: Path) -> None:
    model, tokenizer, target = (tmp_path / name for name in ("model", "tokenizer", "target"))
    model.mkdir()
    tokenizer.mkdir()
    for root, who in ((model, "model"), (tokenizer, "tokenizer")):
        for name in ("config.json", "tokenizer.json", "generation_config.json", "code.py"):
            (root / name).write_text(who)
    (tokenizer / "vocab.txt").write_text("tokenizer")
    _stage(model, tokenizer, target)
    assert _texts(target) == {
        "config.json": "model",
        "generation_config.json": "model",
        "code.py": "model",
        "tokenizer.json": "tokenizer",
        "vocab.txt": "tokenizer",
    }


def test_what_is_there_already_is_not_written_again(tmp_path: Path) -> None:
    source, target = tmp_path / "source", tmp_path / "target"
    for root in (source, target):
        root.mkdir()
        (root / "same").write_text("same")
        (root / "other").write_text(root.name)
    before = os.stat(target / "same")
    found = sidefiles.stage(source, None, target, ID)
    assert staging.waiting_side_files(target, ID) == ["other"]
    staging.place_side_files(target, ID)
    assert os.stat(target / "same").st_ino == before.st_ino
    assert _texts(target) == {"same": "same", "other": "source"}
    assert sorted(found) == ["other", "same"]


@pytest.mark.parametrize("inside", [False, True])
def test_a_target_in_the_model_or_the_model_itself(tmp_path: Path, inside: bool) -> None:
    model = tmp_path / "model"
    model.mkdir()
    (model / "config.json").write_text("c")
    target = model / "saved" if inside else model
    for _ in range(2):
        found = _stage(model, model, target)
        assert found.keys() == {"config.json"}
        assert _texts(target) == {"config.json": "c"}
