"""Every kind of symbol that a patch can replace, on stand-ins for upstream."""

from collections.abc import Callable

import pytest

from tests.patches.toys import a_patch, make_module
from vllm_sharded_state.errors import PatchError
from vllm_sharded_state.patches.contract import Status


def test_every_importer_by_value_is_changed(upstream, monkeypatch):
    importer = make_module(monkeypatch, "upstreamlib_importer", "")
    importer.double = upstream.double
    original = upstream.double
    a_patch(importers=("upstreamlib_importer",)).apply()
    assert importer.double(5) == upstream.double(5) == 10
    a_patch().undo()
    assert importer.double is upstream.double is original


def test_a_name_imported_by_value_is_changed_where_it_is_used_only(upstream, monkeypatch):
    importer = make_module(monkeypatch, "upstreamlib_importer", "")
    importer.double = upstream.double
    toy = a_patch(
        module="upstreamlib_importer",
        defined_in="upstreamlib:double",
        probe=lambda: importer.double(5) != 10,
    )
    assert toy.apply() is Status.APPLIED
    assert (importer.double(5), upstream.double(5)) == (10, 6)


def constant(value: object) -> Callable:
    def make(original: Callable) -> Callable:
        def replacement(*args: object) -> tuple[object, object]:
            return value, original(*args)

        return replacement

    return make


def test_method(upstream):
    raw = vars(upstream.Thing)["method"]
    toy = a_patch(
        symbol="Thing.method",
        make=constant("ours"),
        probe=lambda: upstream.Thing().method() == "upstream",
    )
    toy.apply()
    assert upstream.Thing().method() == ("ours", "upstream")
    toy.undo()
    assert vars(upstream.Thing)["method"] is raw


HANDING_ON = """
class Wrapper:
    inner = "upstream"
    def __getattr__(self, name):
        return getattr(self.inner, name)
"""


def test_a_method_that_a_class_hands_on_is_added_to_it(monkeypatch):
    wrapping = make_module(monkeypatch, "upstreamlib", HANDING_ON)
    toy = a_patch(
        symbol="Wrapper.upper",
        make=constant("ours"),
        probe=lambda: wrapping.Wrapper().upper() == "UPSTREAM",
        handed_on=True,
    )
    assert toy.apply() is Status.APPLIED
    assert wrapping.Wrapper().upper() == ("ours", "UPSTREAM")
    assert wrapping.Wrapper().lower() == "upstream"
    toy.undo()
    assert wrapping.Wrapper().upper() == "UPSTREAM"
    assert "upper" not in vars(wrapping.Wrapper)


@pytest.mark.parametrize(("symbol", "handed_on"), [("Wrapper.upper", False), ("Thing.upper", True)])
def test_a_method_that_is_missing_is_not_taken_for_one_that_is_handed_on(
    monkeypatch, symbol, handed_on
):
    make_module(monkeypatch, "upstreamlib", HANDING_ON + "class Thing: ...")
    with pytest.raises(PatchError, match="upper is missing"):
        a_patch(symbol=symbol, handed_on=handed_on).apply()


def test_static_method_stays_static(upstream):
    toy = a_patch(
        symbol="Thing.static",
        make=constant("ours"),
        probe=lambda: upstream.Thing.static(3) == 3,
    )
    toy.apply()
    assert upstream.Thing.static(3) == upstream.Thing().static(3) == ("ours", 3)
    toy.undo()
    assert upstream.Thing().static(3) == 3


def test_class_method_stays_a_class_method(upstream):
    toy = a_patch(
        symbol="Thing.name",
        make=constant("ours"),
        probe=lambda: upstream.Thing.name() == "Thing",
    )
    toy.apply()
    assert upstream.Thing.name() == ("ours", "Thing")
    toy.undo()
    assert upstream.Thing.name() == "Thing"


def test_new(upstream):
    def make(original: Callable) -> Callable:
        def new(cls: type) -> object:
            thing = original(cls)
            thing.made_by = "ours"
            return thing

        return new

    toy = a_patch(
        symbol="Thing.__new__", make=make, probe=lambda: upstream.Thing().made_by == "upstream"
    )
    toy.apply()
    assert upstream.Thing().made_by == "ours"
    toy.undo()
    assert upstream.Thing().made_by == "upstream"


def test_inherited_method_is_added_to_the_subclass_alone(upstream):
    toy = a_patch(
        symbol="Thing.inherited",
        make=constant("ours"),
        defined_in="upstreamlib:Base.inherited",
        probe=lambda: upstream.Thing().inherited() == "base",
    )
    toy.apply()
    assert upstream.Thing().inherited() == ("ours", "base")
    assert upstream.Base().inherited() == "base"
    toy.undo()
    assert "inherited" not in vars(upstream.Thing)


def test_an_inherited_method_nobody_expected_is_refused(upstream):
    with pytest.raises(PatchError, match=r"upstreamlib\.Base\.inherited"):
        a_patch(symbol="Thing.inherited").apply()
