"""The published JSON schema: up to date, and a judge of its own of what a save writes."""

import json
from pathlib import Path

import jsonschema
import pytest

from tests.test_manifest import whole
from vllm_sharded_state.checkpoint import manifest
from vllm_sharded_state.checkpoint.schema import schema

PATH = Path(__file__).resolve().parent.parent / "docs" / "sharded_state.schema.json"


@pytest.fixture(scope="module")
def judge():
    published = json.loads(PATH.read_bytes())
    jsonschema.Draft202012Validator.check_schema(published)
    return jsonschema.Draft202012Validator(published)


def sound():
    return json.loads(manifest.encode(whole()))


def places(value, place=()):
    """Every place in a manifest, but those whose content is free."""
    if place:
        yield place
    if isinstance(value, dict | list) and place[:1] != ("binding",) and place[-1:] != ("value",):
        for key, item in value.items() if isinstance(value, dict) else enumerate(value):
            yield from places(item, (*place, key))


def put(data, place, value):
    for key in place[:-1]:
        data = data[key]
    data[place[-1]] = value


def test_it_is_up_to_date():
    assert PATH.read_bytes() == schema(), "run: python tools/schema.py"


def test_it_accepts_what_a_save_writes(judge):
    judge.validate(sound())
    judge.validate(json.loads(manifest.encode(whole(source=None, side_files={}))))


@pytest.mark.parametrize(
    "place", list(places(sound())), ids=lambda place: ".".join(map(str, place))
)
def test_it_refuses_another_type_in_each_place(judge, place):
    data = sound()
    put(data, place, [{"of": 1.5}])
    assert not judge.is_valid(data)


@pytest.mark.parametrize(
    "place", [place for place in places(sound()) if len(place) == 1], ids=lambda place: place[0]
)
def test_it_misses_each_field(judge, place):
    data = sound()
    del data[place[0]]
    assert not judge.is_valid(data)


@pytest.mark.parametrize(
    ("place", "value"),
    [
        (("more",), 1),
        (("version",), 1),
        (("version",), 3),
        (("format",), "other"),
        (("save_id",), "0123456789abcdeX"),
        (("save_id",), "0123456789abcdef0"),
        (("checksum",), "0"),
        (("binding", "nonsense"), {}),
        (("side_files", "../a"), {"size": 1, "checksum": "0" * 32}),
        (("ranks",), []),
        (("ranks", 0, "more"), 1),
        (("ranks", 0, "rank"), -1),
        (("ranks", 0, "files", "a/b"), {"size": 1, "header": "0" * 32}),
        (("ranks", 0, "files", "a.safetensors", "size"), -1),
        (("ranks", 0, "files", "a.safetensors", "size"), 1.5),
        (("ranks", 0, "tensors", "top", "dtype"), "F33"),
        (("ranks", 0, "tensors", "top", "kind"), "other"),
        (("ranks", 0, "tensors", "top", "stage"), "other"),
        (("ranks", 0, "tensors", "top", "shape"), [-1]),
        (("ranks", 0, "tensors", "top", "more"), 1),
    ],
    ids=lambda given: ".".join(map(str, given)) if isinstance(given, tuple) else repr(given)[:20],
)
def test_it_refuses_what_the_reader_refuses(judge, tmp_path, place, value):
    data = sound()
    put(data, place, value)
    assert not judge.is_valid(data)
    (tmp_path / manifest.FILE_NAME).write_text(json.dumps(data))
    with pytest.raises(manifest.ManifestError):
        manifest.read(tmp_path)
