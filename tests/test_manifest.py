"""The manifest by itself: what a save writes comes back, and nothing else is read."""

import json
import os

import pytest
import torch

from tests.support import edit, manifests
from vllm_sharded_state.checkpoint import manifest
from vllm_sharded_state.checkpoint.manifest import (
    FileEntry,
    Manifest,
    RankEntry,
    SideFile,
    Source,
    SourceFile,
    TensorEntry,
    UnitEntry,
    ValueEntry,
)
from vllm_sharded_state.errors import ManifestError

SUM = "0123456789abcdef" * 2
LAYER = "model.layers.0.mlp"


def tensor(**changes):
    fields = {
        "file": "a.safetensors",
        "key": f"{LAYER}.weight",
        "kind": "parameter",
        "dtype": "BF16",
        "shape": [2, 3],
        "stage": "runtime",
        "checksum": SUM,
    }
    return TensorEntry(**(fields | changes))


def rank(number=0, **changes):
    fields = {
        "files": {"a.safetensors": FileEntry(800, SUM), "b.safetensors": FileEntry(80, SUM)},
        "units": {
            LAYER: UnitEntry("runtime", "vllm.Method", {"kernel": "Machete", "split": False}),
            "": UnitEntry("source", None),
        },
        "kernels": {LAYER: SUM},
        "kernel_environment": "here",
        "tensors": {
            f"{LAYER}.weight": tensor(aliases=[f"{LAYER}.again"]),
            f"{LAYER}.hidden": tensor(
                key="hidden", kind="attribute", owner=LAYER, replace=True, stride=[1, 2]
            ),
            "top": tensor(key="top", stage="source", shape=[], dtype="F32"),
            "top@again": tensor(key="top", file="b.safetensors"),
        },
        "values": {
            f"{LAYER}.scale": ValueEntry({"float": "0x1.8p-3"}, "runtime", LAYER),
            f"{LAYER}.scale@again": ValueEntry(None, "source"),
            "flag": ValueEntry(True, "runtime"),
        },
    }
    return RankEntry(number, **(fields | changes))


def whole(**changes):
    fields = {
        "written_by": {"vllm-sharded-state": "0.1.0", "vllm": "0.32.0"},
        "save_id": "0123456789abcdef",
        "binding": {
            "world": {"tensor_parallel_size": 1, "pipeline_parallel_size": 1},
            "model": {"config.eps": "1e-05", "config.täg": ["ä", {"x": None}, 2**70]},
        },
        "tied_word_embeddings": False,
        "source": Source(
            "org/model",
            "main",
            {"m.safetensors": SourceFile(9, SUM, SUM), "x.bin": SourceFile(9, None, SUM)},
        ),
        "side_files": {"sub/code.py": SideFile(0, SUM)},
        "ranks": [rank()],
    }
    return Manifest(**(fields | changes))


def test_a_manifest_comes_back_and_none_is_none(tmp_path):
    assert manifest.read(tmp_path) is None
    manifests.write(tmp_path, whole())
    assert manifest.read(tmp_path) == whole()
    assert [path.name for path in tmp_path.iterdir()] == [manifest.FILE_NAME]


def test_it_is_json_that_a_person_can_read(tmp_path):
    manifests.write(tmp_path, whole())
    text = (tmp_path / manifest.FILE_NAME).read_text()
    data = json.loads(text)
    assert list(data)[:4] == ["checksum", "format", "version", "written_by"]
    assert json.dumps(data, indent=1, ensure_ascii=False) == text
    assert data["ranks"][0]["tensors"][f"{LAYER}.weight"]["aliases"] == [f"{LAYER}.again"]


def test_the_order_in_which_it_was_filled_leaves_no_trace(tmp_path):
    turned = rank(tensors=dict(reversed(rank().tensors.items())))
    assert manifest.encode(whole(ranks=[turned])) == manifest.encode(whole())


def test_any_changed_or_missing_byte_is_refused(tmp_path):
    manifests.write(tmp_path, whole())
    path = tmp_path / manifest.FILE_NAME
    text = path.read_bytes()
    spoiled = [text[:at] + bytes([text[at] ^ 1]) + text[at + 1 :] for at in range(len(text))]
    spoiled += [text[:end] for end in range(0, len(text), 7)]
    spoiled += [text + b"\n", b"\xef\xbb\xbf" + text, text.decode().encode("utf-16"), b" " + text]
    for data in spoiled:
        path.write_bytes(data)
        with pytest.raises(ManifestError, match=manifest.FILE_NAME):
            manifest.read(tmp_path)


def refused(directory, text, words):
    """A manifest whose checksum fits its `text` is refused with `words`."""
    edit.sign(directory, text)
    with pytest.raises(ManifestError, match=words) as caught:
        manifest.read(directory)
    assert str(directory / manifest.FILE_NAME) in str(caught.value)
    assert len(str(caught.value)) < 1000
    assert len(str(caught.value).splitlines()) <= 3


@pytest.fixture
def text():
    """All of a sound manifest but its checksum."""
    head, _, rest = manifest.encode(whole()).partition(b",\n")
    assert head.startswith(b'{\n "checksum"')
    return b"{\n" + rest


@pytest.mark.parametrize(
    ("before", "after", "words"),
    [
        (b'"size": 80,', b'"size": 80, "size": 80,', "doubled key"),
        (b'"version": 2,', b'"version": 2, "version": 2,', "doubled key"),
        (b'"size": 80,', b'"size": 80.0,', "int"),
        (b'"size": 80,', b'"size": 8e1,', "int"),
        (b'"size": 80,', b'"size": "80",', "int"),
        (b'"size": 80,', b'"size": true,', "int"),
        (b'"size": 80,', b'"size": -80,', ">= 0"),
        (b'"size": 80,', b'"size": NaN,', "malformed"),
        (b'"size": 80,', b'"size": 1e999,', "range|int"),
        (b'"size": 80,', b'"size": 9223372036854775808,', "range|int|<="),
        (b'"size": 80,', b'"size": 80, "more": 1,', "unknown field `more`"),
        (b'"save_id"', b'"more": 1, "save_id"', "unknown field `more`"),
        (b'"1e-05"', b"1e-05", "another spelling"),
        (b'"1e-05"', b"Infinity", "malformed"),
        (b'"1e-05"', b'"1\\u0065-05"', "another spelling"),
        (b'"1e-05"', b'"\\ud800"', "malformed|truncated|Invalid|surrogate"),
        (b'"replace": true', b'"replace": false', "another spelling"),
        (b'"tied_word_embeddings": false,', b"", "tied_word_embeddings"),
        (b'"layout": "source"', b'"layout": "sideways"', "layout"),
        (b'"BF16"', b'"BF17"', "dtype"),
        (b'"save_id": "0', b'"save_id": "X', "save_id"),
        (b'"runtime"', b'"sometime"', "Invalid enum value 'sometime'"),
        (SUM.encode(), SUM.encode()[1:], "a checksum"),
        (SUM.encode(), SUM.encode() + b"\\n", "a checksum"),
    ],
)
def test_an_edit_with_a_checksum_that_fits_is_refused(tmp_path, text, before, after, words):
    edit.sign(tmp_path, text)
    assert manifest.read(tmp_path) == whole()
    assert before in text
    refused(tmp_path, text.replace(before, after, 1), words)


def _places():
    """Every place in a manifest that holds a value of one type."""
    data = json.loads(manifest.encode(whole()))
    del data["checksum"]

    def walk(value, place):
        yield place
        if isinstance(value, dict | list):
            for key, item in value.items() if isinstance(value, dict) else enumerate(value):
                yield from walk(item, (*place, key))

    # What a binding, a choice or a value is, is not for the manifest to say.
    free = ("binding", "choices", "values")
    return [place for place in walk(data, ()) if place and not set(free) & set(place[:-1])]


@pytest.mark.parametrize("place", _places(), ids=lambda place: ".".join(map(str, place)))
def test_every_field_has_its_type(tmp_path, place):
    data = json.loads(manifest.encode(whole()))
    del data["checksum"]
    holder = data
    for key in place[:-1]:
        holder = holder[key]
    holder[place[-1]] = [{"of": 1.5}]
    refused(tmp_path, json.dumps(data, indent=1, ensure_ascii=False).encode(), "damaged|is refused")


@pytest.mark.parametrize(
    "name", ["../a", "/a", "a/b", "..", ".", "", "a\0b", "a\\b", ".hidden", "a\n", "x" * 256]
)
def test_names_that_are_no_plain_file_names_are_refused(tmp_path, name):
    files = rank().files | {name: FileEntry(80, SUM)}
    words = "length <= 255" if len(name) > 255 else "is not a plain file name"
    with pytest.raises(ManifestError, match=words):
        manifests.write(tmp_path, whole(ranks=[rank(files=files)]))
    data = json.loads(manifest.encode(whole()))
    del data["checksum"]
    data["ranks"][0]["files"][name] = {"size": 80, "header": SUM}
    refused(tmp_path, json.dumps(data, indent=1, ensure_ascii=False).encode(), words)


@pytest.mark.parametrize(
    "name", ["../a", "/a", "..", ".", "", "a//b", "a/", "a/../b", "./a", "a\n"]
)
def test_paths_that_lead_out_of_the_directory_are_refused(name):
    with pytest.raises(ManifestError, match="is not a path below the directory"):
        manifest.encode(whole(side_files={name: SideFile(0, SUM)}))


@pytest.mark.parametrize("name", ["a", ".gitattributes", "a/.b/c.d", "...", "a/..b", "ä b"])
def test_paths_below_the_directory_are_not(tmp_path, name):
    manifests.write(tmp_path, whole(side_files={name: SideFile(0, SUM)}))
    assert set(manifest.read(tmp_path).side_files) == {name}


def _with(name, entry):
    return rank(tensors=rank().tensors | {name: entry})


def _world(tensor_parallel, pipeline_parallel):
    sizes = {"tensor_parallel_size": tensor_parallel, "pipeline_parallel_size": pipeline_parallel}
    return {"world": sizes}


def _second(**changes):
    return rank(1, files={"c.safetensors": FileEntry(800, SUM)}, tensors={}, **changes)


CONTRADICTIONS = {
    "file that is not listed": (
        {"ranks": [_with(f"{LAYER}.x", tensor(file="z.safetensors"))]},
        "x lies in 'z.safetensors', which is not listed",
    ),
    "key twice": ({"ranks": [_with(f"{LAYER}.x", tensor())]}, "key .*weight of a.safetensors"),
    "path twice": (
        {"ranks": [_with(f"{LAYER}.x", tensor(key="x", aliases=[f"{LAYER}.again"]))]},
        "again is listed twice in stage runtime",
    ),
    "alias of itself": (
        {"ranks": [_with(f"{LAYER}.x", tensor(key="x", aliases=[f"{LAYER}.x"]))]},
        "x is listed twice",
    ),
    "no unit": (
        {"ranks": [rank(units={LAYER: UnitEntry("runtime", None)})]},
        "lies in no unit that is listed",
    ),
    "too deep": ({"ranks": [_with("a." * 100 + "b", tensor(key="x"))]}, "lies in no unit"),
    "kernel of no unit": (
        {
            "ranks": [
                rank(
                    units={LAYER: UnitEntry("runtime", None)},
                    tensors={},
                    values={},
                    kernels={"x": SUM},
                )
            ]
        },
        "kernel of x",
    ),
    "attribute of another module": (
        {"ranks": [_with(f"{LAYER}.x", tensor(key="x", owner="model.layers.1"))]},
        "attribute of 'model.layers.1'",
    ),
    "value of another module": (
        {"ranks": [rank(values={f"{LAYER}.v": ValueEntry(1, "runtime", "model.layers.1")})]},
        "attribute of 'model.layers.1'",
    ),
    "strides for other dimensions": (
        {"ranks": [_with(f"{LAYER}.x", tensor(key="x", stride=[1]))]},
        "2 dimensions and 1 strides",
    ),
    "more bytes than the file": (
        {"ranks": [_with(f"{LAYER}.x", tensor(key="x", shape=[2**40, 2**40]))]},
        "a.safetensors has 800 bytes, and its tensors take",
    ),
    "no rank 0": ({"ranks": [rank(1)]}, r"ranks are \[1\]"),
    "a rank twice": (
        {"ranks": [rank(0), rank(0)], "binding": _world(2, 1)},
        r"ranks are \[0, 0\]",
    ),
    "fewer ranks than the world": ({"binding": _world(2, 2)}, "lists 1 ranks, .* make 4"),
    "more ranks than the world": ({"ranks": [rank(), _second()]}, "lists 2 ranks, .* make 1"),
    "a world of no size": ({"binding": _world(0, 1)}, r"\[0, 1\]"),
    "a world of words": ({"binding": _world("two", 1)}, "two"),
    "one file of two ranks": (
        {"ranks": [rank(), rank(1)], "binding": _world(1, 2)},
        "a.safetensors is listed by rank 0 and by rank 1",
    ),
}


@pytest.mark.parametrize("name", CONTRADICTIONS)
def test_what_contradicts_itself_is_neither_written_nor_read(tmp_path, monkeypatch, name):
    changes, words = CONTRADICTIONS[name]
    with pytest.raises(ManifestError, match=words):
        manifests.write(tmp_path, whole(**changes))
    assert not list(tmp_path.iterdir())
    with monkeypatch.context() as patched:
        patched.setattr(manifest, "violation", lambda _: None)
        manifests.write(tmp_path, whole(**changes))
    with pytest.raises(ManifestError, match=words):
        manifest.read(tmp_path)


def test_several_ranks_are_read_in_order(tmp_path):
    manifests.write(tmp_path, whole(ranks=[rank(), _second()], binding=_world(2, 1)))
    found = manifest.read(tmp_path)
    assert found.rank(1) == _second()
    with pytest.raises(ManifestError, match="no entry for rank 2"):
        found.rank(2)


@pytest.mark.parametrize("version", [0, 1, 3, 99])
def test_other_versions_are_refused_with_what_to_do(tmp_path, version):
    """Whatever else they hold: only format, version and writer keep their place for ever."""
    data = {"ranks": "other", "version": version, "format": manifest.FORMAT, "new": [{}]}
    data["written_by"] = {"vllm-sharded-state": "7.8.9"}
    (tmp_path / manifest.FILE_NAME).write_text(json.dumps(data))
    with pytest.raises(
        ManifestError, match=f"7.8.9 wrote it in format version {version}"
    ) as caught:
        manifest.read(tmp_path)
    advice = "Install that version" if version > manifest.VERSION else "Save the model again"
    assert advice in str(caught.value)


def test_an_edit_from_outside_that_keeps_to_the_form_is_read(tmp_path):
    """The tests' own way to write one, which shares no code with the product."""
    manifests.write(tmp_path, whole())
    data = edit.read_manifest(tmp_path)
    data["ranks"][0]["values"] = {
        "z": {"value": 1, "stage": "runtime"},
        "flag": {"value": 2, "stage": "runtime"},
    }
    edit.write_manifest(tmp_path, data)
    assert manifest.read(tmp_path).ranks[0].values == {
        "flag": ValueEntry(2, "runtime"),
        "z": ValueEntry(1, "runtime"),
    }


@pytest.mark.parametrize(
    "text",
    [
        b"",
        b"null",
        b"{}",
        b'"' + b"x" * 10_000,
        b"9" * 100_000,
        b"[" * 1000 + b"]" * 1000,
        b"[" * 100_000 + b"]" * 100_000,
        b'{"format": ' * 100_000,
        b'{"x": ' + b"[" * 100_000 + b"]" * 100_000 + b"}",
        b'{"format": "another", "version": 2}',
        b'{"format": "vllm-sharded-state", "version": "2"}',
        b'{"format": "vllm-sharded-state", "version": 2}',
        b'{"format": "vllm-sharded-state", "version": ' + b"9" * 10_000 + b"}",
        b'{"format": "' + b"\\n" * 10_000 + b'", "version": 2}',
    ],
    ids=range(14),
)
def test_json_that_is_no_manifest_is_refused(tmp_path, text):
    path = tmp_path / manifest.FILE_NAME
    path.write_bytes(text)
    with pytest.raises(ManifestError, match=manifest.FILE_NAME) as caught:
        manifest.read(tmp_path)
    assert len(str(caught.value)) < 1000
    assert len(str(caught.value).splitlines()) <= 3


@pytest.mark.parametrize("group", ["binding", "choices"])
def test_depth_is_bounded_where_anything_may_stand(tmp_path, text, group):
    deep = b"[" * 100_000 + b"]" * 100_000
    before = b'"1e-05"' if group == "binding" else b'"Machete"'
    assert before in text
    refused(tmp_path, text.replace(before, deep, 1), "recursion|depth")


def test_a_manifest_of_a_gigabyte_is_refused_before_it_is_read(tmp_path):
    path = tmp_path / manifest.FILE_NAME
    with open(path, "wb") as file:
        file.truncate(1 << 30)
    with pytest.raises(
        ManifestError, match=f"has {1 << 30} bytes, and at most {manifest.MAX_BYTES}"
    ):
        manifest.read(tmp_path)


@pytest.mark.parametrize("what", [b'{"rank": 0}', b"[]"])
def test_text_that_takes_many_times_its_size_in_memory_is_refused(tmp_path, text, what):
    many = b", ".join([what] * 200_000)
    before = b'"ranks": [' if b"rank" in what else b'"config.t\xc3\xa4g": ['
    assert before in text
    refused(tmp_path, text.replace(before, before + many + b", ", 1), "more objects and lists")


def test_the_densest_that_a_save_writes_is_read(tmp_path):
    units = {f"m{number}": UnitEntry("source", None) for number in range(30_000)}
    values = {f"m{number}.v": ValueEntry(1, "source") for number in range(30_000)}
    dense = whole(ranks=[rank(units=units, values=values, tensors={}, kernels={})])
    manifests.write(tmp_path, dense)
    assert manifest.read(tmp_path) == dense


def test_none_is_written_that_would_not_be_read(tmp_path, monkeypatch):
    monkeypatch.setattr(manifest, "MAX_BYTES", 1000)
    with pytest.raises(ManifestError, match="no more than 1000 are read again"):
        manifests.write(tmp_path, whole())
    assert not list(tmp_path.iterdir())


def test_kinds_of_strings_and_numbers_are_written_as_what_they_are(tmp_path):
    class Number(int):
        pass

    values = {"flag": ValueEntry(Number(7), "runtime")}
    manifests.write(
        tmp_path, whole(written_by={"torch": torch.__version__}, ranks=[rank(values=values)])
    )
    assert type(torch.__version__) is not str
    assert manifest.read(tmp_path).written_by == {"torch": str(torch.__version__)}
    assert manifest.read(tmp_path).ranks[0].values["flag"].value == 7
    with pytest.raises(ManifestError, match="a complex is no JSON"):
        manifest.encode(whole(ranks=[rank(values={"flag": ValueEntry(1j, "runtime")})]))


@pytest.mark.parametrize("name", ["\ud800", ""])
def test_a_name_that_json_cannot_hold_is_refused_when_saving(name):
    with pytest.raises(ManifestError, match="can't hold this model"):
        manifest.encode(whole(ranks=[_with(name, tensor(key="x"))]))


def test_only_a_regular_file_is_read(tmp_path):
    path = tmp_path / manifest.FILE_NAME
    path.mkdir()
    with pytest.raises(ManifestError, match=r"no regular file|directory"):
        manifest.read(tmp_path)
    path.rmdir()
    os.mkfifo(path)  # nobody writes to it: it must not be waited for
    with pytest.raises(ManifestError, match="no regular file"):
        manifest.read(tmp_path)
    path.unlink()
    path.symlink_to("/dev/zero")
    with pytest.raises(ManifestError, match="no regular file"):
        manifest.read(tmp_path)
    path.unlink()
    path.symlink_to(tmp_path / "nothing")
    with pytest.raises(ManifestError, match="link to nothing"):
        manifest.read(tmp_path)
    path.unlink()
    (tmp_path / "blob").mkdir()  # as a hub's cache has it
    manifests.write(tmp_path / "blob", whole())
    path.symlink_to(tmp_path / "blob" / manifest.FILE_NAME)
    assert manifest.read(tmp_path) == whole()
