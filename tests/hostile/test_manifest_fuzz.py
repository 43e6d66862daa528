"""Manifests that hypothesis makes up, from a real one: an error of ours, or the original."""

import copy
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.hostile import spoil
from tests.hostile.goods import Yard
from tests.hostile.test_header_fuzz import FUZZ, anything
from tests.support import edit, manifests
from vllm_sharded_state.checkpoint import manifest
from vllm_sharded_state.errors import ManifestError

pytestmark = pytest.mark.engine


@pytest.fixture(scope="module", params=["runtime", "fp8"])
def directory(
    request: pytest.FixtureRequest, yard: Yard, tmp_path_factory: pytest.TempPathFactory
) -> Path:
    """One that holds a good manifest, and nothing else; each example leaves its own there."""
    made = tmp_path_factory.mktemp("manifests")
    text = (yard.good(request.param) / edit.MANIFEST).read_bytes()
    (made / edit.MANIFEST).write_bytes(text)
    (made / "good").write_bytes(text)
    return made


def _read(directory: Path) -> Any:
    """What is read; None where it is refused, naming the file."""
    refusal = None
    try:
        return manifest.read(directory)
    except ManifestError as error:
        refusal = str(error)
    assert edit.MANIFEST in refusal
    assert len(refusal) < 4000
    return None


def _put_good(directory: Path) -> tuple[bytes, Any]:
    """The good manifest's bytes, in place, and what is read of them."""
    text = (directory / "good").read_bytes()
    (directory / edit.MANIFEST).write_bytes(text)
    original = manifest.read(directory)
    assert original is not None
    return text, original


def _places(data: Any, depth: int = 0) -> Iterator[tuple[Any, Any]]:
    """Every container of a JSON tree with each of its keys."""
    steps = data.items() if isinstance(data, dict) else enumerate(data)
    for key, value in list(steps):
        yield data, key
        if isinstance(value, dict | list):
            yield from _places(value, depth + 1)


@FUZZ
@given(st.data())
def test_a_changed_field(directory: Path, data: st.DataObject) -> None:
    """With the checksum as it was: refused, or nothing changed. With one that fits: no crash."""
    text, original = _put_good(directory)
    good = json.loads(text)
    spoiled = copy.deepcopy(good)
    places = list(_places(spoiled))
    container, key = places[data.draw(st.integers(0, len(places) - 1))]
    what = data.draw(st.sampled_from(["gone", "anything", "another's", "more"]))
    if what == "gone":
        del container[key]
    elif what == "anything":
        container[key] = data.draw(anything)
    elif what == "another's":
        other, name = places[data.draw(st.integers(0, len(places) - 1))]
        if name in other if isinstance(other, dict) else name < len(other):
            container[key] = copy.deepcopy(other[name])
    elif isinstance(container, dict):
        container[data.draw(st.text(max_size=8))] = data.draw(anything)
    else:
        container.append(data.draw(anything))
    path = directory / edit.MANIFEST
    if json.dumps(spoiled, sort_keys=True) != json.dumps(good, sort_keys=True):
        path.write_bytes(json.dumps(spoiled, indent=1).encode())
        assert _read(directory) in (None, original)
    spoil.sign(directory, spoiled)
    found = _read(directory)
    if found is not None:  # Then it is a manifest, and comes back from what is written of it.
        manifests.write(directory, found)
        assert manifest.read(directory) == found


@FUZZ
@given(st.data())
def test_changed_bytes(directory: Path, data: st.DataObject) -> None:
    text, original = _put_good(directory)
    place = data.draw(st.integers(0, len(text) - 1))
    put = data.draw(st.one_of(st.binary(max_size=6), st.text(max_size=4).map(str.encode)))
    lost = data.draw(st.integers(0, 6))
    (directory / edit.MANIFEST).write_bytes(text[:place] + put + text[place + lost :])
    assert _read(directory) in (None, original)


@FUZZ
@given(st.one_of(st.binary(max_size=300), st.text(max_size=300).map(spoil.encoded)))
def test_bytes_of_all_kinds(directory: Path, data: bytes) -> None:
    (directory / edit.MANIFEST).write_bytes(data)
    assert _read(directory) is None


@FUZZ
@given(anything)
def test_json_of_all_kinds(directory: Path, data: Any) -> None:
    (directory / edit.MANIFEST).write_bytes(spoil.encoded(json.dumps(data)))
    assert _read(directory) is None
    if isinstance(data, dict):
        spoil.sign(directory, data)
        assert _read(directory) is None
