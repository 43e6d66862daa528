"""Which checkpoint a saved state comes from: two fine-tunes that differ in one bit are told apart."""

import json
import threading
from types import SimpleNamespace

import pytest
import torch
from safetensors.torch import save_file
from xxhash import xxh3_128_hexdigest

from tests.support import manifests
from vllm_sharded_state import source_identity
from vllm_sharded_state.checkpoint import fingerprint, staging
from vllm_sharded_state.checkpoint.manifest import Manifest, RankEntry, Source, SourceFile
from vllm_sharded_state.errors import MismatchError, OptionError
from vllm_sharded_state.source_identity import Recorder, refuse_other, weight_files


def _fine_tune(folder, change=0.0, parts=2):
    """A checkpoint of `parts` files; all have the same names, sizes and headers."""
    folder.mkdir()
    for part in range(parts):
        tensor = torch.arange(5000.0) + part
        tensor[4999] += change
        save_file({f"w{part}": tensor}, folder / f"model-{part}.safetensors")
    (folder / "config.json").write_text("{}")
    return folder


def _config(folder, load_format="auto"):
    model = SimpleNamespace(model=str(folder), revision="main")
    return SimpleNamespace(model_config=model, load_config=SimpleNamespace(load_format=load_format))


def _recorded(folder, **config):
    return Recorder(_config(folder, **config), folder).result()


def test_what_is_recorded_is_what_the_files_are(tmp_path):
    source = _recorded(_fine_tune(tmp_path / "a"))
    assert (source.name, source.revision, source.through) == (str(tmp_path / "a"), "main", [])
    assert set(source.files) == {"model-0.safetensors", "model-1.safetensors"}
    for name, found in source.files.items():
        data = (tmp_path / "a" / name).read_bytes()
        header = data[: 8 + int.from_bytes(data[:8], "little")]
        assert found == SourceFile(len(data), xxh3_128_hexdigest(header), xxh3_128_hexdigest(data))


def test_two_fine_tunes_agree_in_all_but_content_and_are_told_apart(tmp_path):
    source = _recorded(_fine_tune(tmp_path / "a"))
    other = _fine_tune(tmp_path / "b", change=0.001)
    for name in source.files:
        assert fingerprint.outline(other / name) == fingerprint.outline(tmp_path / "a" / name)
    same = _fine_tune(tmp_path / "c")
    refuse_other(source, "c", same, tmp_path)
    with pytest.raises(MismatchError) as caught:
        refuse_other(source, "b", other, tmp_path)
    message = str(caught.value)
    assert str(tmp_path / "a") in message
    for name in source.files:
        assert (
            f"{name}: other content (checksum saved {source.files[name].checksum}, here" in message
        )
        assert xxh3_128_hexdigest((other / name).read_bytes()) in message


def test_only_the_files_that_differ_are_named(tmp_path):
    source = _recorded(_fine_tune(tmp_path / "a"))
    other = _fine_tune(tmp_path / "b")
    path = other / "model-1.safetensors"
    data = bytearray(path.read_bytes())
    data[-1] ^= 1
    path.write_bytes(data)
    with pytest.raises(MismatchError, match=r"model-1\.safetensors: other content") as caught:
        refuse_other(source, "b", other, tmp_path)
    assert "model-0" not in str(caught.value)


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (lambda path: path.unlink(), "model-1.safetensors: not there"),
        (
            lambda path: save_file({"x": torch.zeros(1)}, path.parent / "model-2.safetensors"),
            "model-2.safetensors: was not there",
        ),
        (
            lambda path: path.write_bytes(path.read_bytes() + b"\0"),
            "model-1.safetensors: saved from",
        ),
        (
            lambda path: path.write_bytes(path.read_bytes().replace(b'"w1"', b'"x1"')),
            "model-1.safetensors: other tensors",
        ),
    ],
    ids=["missing", "more", "size", "header"],
)
def test_names_sizes_and_headers_are_compared_before_any_content(
    tmp_path, monkeypatch, change, words
):
    source = _recorded(_fine_tune(tmp_path / "a"))
    other = _fine_tune(tmp_path / "b")
    change(other / "model-1.safetensors")
    monkeypatch.setattr(fingerprint, "content", None)  # reading a content would fail
    with pytest.raises(MismatchError, match=words):
        refuse_other(source, "b", other, tmp_path)


def test_what_cannot_be_compared_is_refused(tmp_path):
    source = _recorded(_fine_tune(tmp_path / "a"))
    with pytest.raises(OptionError, match="nowhere"):
        refuse_other(source, "nowhere", None, tmp_path)
    with pytest.raises(MismatchError, match="does not record what it was saved from"):
        refuse_other(None, "a", tmp_path / "a", tmp_path)
    with pytest.raises(MismatchError, match="can't be compared"):
        refuse_other(source, "b", tmp_path / "b", tmp_path)


def test_a_source_on_no_disk_is_recorded_as_none(tmp_path, caplog):
    assert Recorder(_config("org/model"), None).result() is None
    assert _recorded(_fine_tune(tmp_path / "a"), load_format="dummy") is None
    (tmp_path / "empty").mkdir()
    assert _recorded(tmp_path / "empty") is None


def test_a_file_that_is_gone_leaves_a_warning_and_none(tmp_path, monkeypatch):
    folder = _fine_tune(tmp_path / "a")
    said = []
    monkeypatch.setattr(
        source_identity.logger, "warning", lambda text, *given: said.append(text % given)
    )
    (folder / "model-0.safetensors").unlink()
    (folder / "model.safetensors.index.json").write_text("[]")
    assert _recorded(folder) is None
    assert len(said) == 1
    assert "model.safetensors.index.json is no index" in said[0]


def _sharded(directory, source):
    directory.mkdir()
    written = Manifest(
        written_by={},
        save_id=staging.new_id(),
        binding={},
        tied_word_embeddings=False,
        source=source,
        ranks=[RankEntry(0)],
    )
    manifests.write(directory, written)
    return written.save_id


def test_an_engine_started_from_sharded_state_hands_on_what_that_came_from(tmp_path):
    first = _recorded(_fine_tune(tmp_path / "a"))
    one = _sharded(tmp_path / "one", first)
    second = _recorded(tmp_path / "one", load_format="sharded_state")
    assert (second.files, second.through) == (first.files, [one])
    two = _sharded(tmp_path / "two", second)
    third = _recorded(tmp_path / "two", load_format="sharded_state")
    assert third == Source(first.name, first.revision, first.files, [one, two])
    refuse_other(third, "a", tmp_path / "a", tmp_path)
    _sharded(tmp_path / "three", None)
    assert _recorded(tmp_path / "three", load_format="sharded_state") is None


def test_files_that_hold_no_weights_of_the_model_are_left_out(tmp_path):
    folder = _fine_tune(tmp_path / "a")
    for name in ("training_args.bin", "pytorch_model.bin", "consolidated.safetensors"):
        (folder / name).write_bytes(b"x")
    assert len(weight_files(folder)) == 3
    index = {"weight_map": {"w0": "model-0.safetensors", "w1": "model-1.safetensors"}}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    assert weight_files(folder) == ["model-0.safetensors", "model-1.safetensors"]
    for path in folder.glob("*.safetensors"):
        path.unlink()
    assert weight_files(folder) == ["pytorch_model.bin"]


def test_a_single_file_is_its_own_checkpoint(tmp_path):
    path = tmp_path / "model.gguf"
    path.write_bytes(b"GGUF" * 1000)
    source = Recorder(_config(path), None).result()
    assert source.files == {
        "model.gguf": SourceFile(4000, None, xxh3_128_hexdigest(path.read_bytes()))
    }


@pytest.mark.parametrize(
    "data", [b"", b"1234567", b"\xff" * 100, (93).to_bytes(8, "little") + bytes(92)]
)
def test_what_is_no_safetensors_file_has_no_header(tmp_path, data):
    path = tmp_path / "a.safetensors"
    path.write_bytes(data)
    assert fingerprint.outline(path) == (len(data), None)


def test_a_file_that_grows_while_it_is_read_is_not_recorded(tmp_path, monkeypatch):
    path = tmp_path / "a.safetensors"
    save_file({"w": torch.zeros(10)}, path)
    outline = fingerprint.outline

    def grow(given):
        found = outline(given)
        with open(given, "ab") as file:
            file.write(b"more")
        return found

    monkeypatch.setattr(fingerprint, "outline", grow)
    with pytest.raises(OSError, match="somebody writes to it"):
        fingerprint.source_file(path)


def test_it_is_read_in_the_background(tmp_path, monkeypatch):
    folder = _fine_tune(tmp_path / "a")
    go_on, content = threading.Event(), fingerprint.content

    def wait(path):
        assert go_on.wait(60)
        return content(path)

    monkeypatch.setattr(fingerprint, "content", wait)
    recorder = Recorder(_config(folder), folder)  # comes back although nothing can be read yet
    go_on.set()
    assert len(recorder.result().files) == 2
