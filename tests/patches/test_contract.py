"""The patch contract, on stand-ins for upstream."""

import sys
import types
from collections.abc import Callable, Iterator

import pytest

from vllm_sharded_state.errors import OptionError, PatchError
from vllm_sharded_state.patches import PATCHES, apply_all, contract
from vllm_sharded_state.patches.contract import MARK, Patch, Status

UPSTREAM = """
def double(number):
    "Upstream's words."
    return number + 1  # the fault

class Base:
    def inherited(self):
        return "base"

class Thing(Base):
    def __new__(cls):
        thing = super().__new__(cls)
        thing.made_by = "upstream"
        return thing

    def method(self):
        return "upstream"

    @staticmethod
    def static(number):
        return number

    @classmethod
    def name(cls):
        return cls.__name__
"""

FOREIGN = """
import functools

def wrap(function):
    @functools.wraps(function)
    def wrapper(*args, **kwargs):
        return function(*args, **kwargs)
    return wrapper

def double(number):
    return 0
"""


def make_module(monkeypatch: pytest.MonkeyPatch, name: str, source: str) -> types.ModuleType:
    module = types.ModuleType(name)
    exec(source, module.__dict__)
    monkeypatch.setitem(sys.modules, name, module)
    return module


@pytest.fixture
def upstream(monkeypatch: pytest.MonkeyPatch) -> Iterator[types.ModuleType]:
    before = dict(contract._places)
    yield make_module(monkeypatch, "upstreamlib", UPSTREAM)
    contract._places.clear()
    contract._places.update(before)


@pytest.fixture
def foreign(monkeypatch: pytest.MonkeyPatch) -> types.ModuleType:
    return make_module(monkeypatch, "foreignlib", FOREIGN)


def make_double(original: Callable[[int], int]) -> Callable[[int], int]:
    def replacement(number: int) -> int:
        return 2 * number

    return replacement


def faulty() -> bool:
    return sys.modules["upstreamlib"].double(5) != 10


def a_patch(**changes: object) -> Patch:
    values: dict = {
        "name": "toy",
        "module": "upstreamlib",
        "symbol": "double",
        "probe": faulty,
        "make": make_double,
    }
    return Patch(**(values | changes))


def test_replaces_marks_and_undoes(upstream):
    original = upstream.double
    assert upstream.double(5) == 6
    assert a_patch().apply() is Status.APPLIED
    assert upstream.double(5) == 10
    assert getattr(upstream.double, MARK) == "toy"
    assert upstream.double.__wrapped__ is original
    assert upstream.double.__doc__ == "Upstream's words."
    a_patch().undo()
    assert upstream.double is original
    a_patch().undo()
    assert upstream.double is original


def test_does_not_stack_on_itself(upstream):
    a_patch().apply()
    first = upstream.double
    assert a_patch().apply() is Status.APPLIED
    assert upstream.double is first


@pytest.mark.parametrize("patch", PATCHES, ids=lambda patch: patch.name)
def test_does_not_stack_on_itself_when_imported_afresh(patch, monkeypatch):
    patch.apply()
    owner = patch._find_owner(patch.module)
    attribute = patch.symbol.rpartition(".")[2]
    first = vars(owner)[attribute]
    with monkeypatch.context() as afresh:
        afresh.setattr(contract, "_places", {})
        assert patch.apply() is Status.APPLIED
        assert contract._places == {}
    assert vars(owner)[attribute] is first


def test_second_apply_is_harmless_when_somebody_wrapped_ours(upstream, foreign):
    a_patch().apply()
    upstream.double = foreign.wrap(upstream.double)
    theirs = upstream.double
    assert a_patch().apply() is Status.APPLIED
    assert upstream.double is theirs
    with pytest.raises(PatchError, match=r"cannot be undone.*foreignlib\.double"):
        a_patch().undo()
    assert upstream.double is theirs


def test_disabled_changes_nothing(upstream):
    original = upstream.double
    assert a_patch().apply(disabled=True) is Status.DISABLED
    assert upstream.double is original


def test_stands_aside_when_the_fault_is_absent(upstream):
    exec("def double(number):\n    return 2 * number", upstream.__dict__)
    fixed = upstream.double
    assert a_patch().apply() is Status.NOT_NEEDED
    assert upstream.double is fixed


def test_refuses_a_foreign_replacement_and_says_whose(upstream, foreign):
    upstream.double = foreign.double
    with pytest.raises(PatchError, match=r"'toy'.*upstreamlib\.double.*by foreignlib\.double"):
        a_patch().apply()
    assert upstream.double is foreign.double


def test_refuses_a_foreign_wrapper_that_copied_upstreams_names(upstream, foreign):
    upstream.double = foreign.wrap(upstream.double)
    assert (upstream.double.__module__, upstream.double.__qualname__) == ("upstreamlib", "double")
    with pytest.raises(PatchError, match=r"by foreignlib\.double"):
        a_patch().apply()


def test_refuses_another_patchs_mark(upstream):
    a_patch(name="other").apply()
    with pytest.raises(PatchError, match="'other'"):
        a_patch().apply()


def test_refuses_a_callable_object(upstream):
    class Counter:
        def __call__(self, number: int) -> int:
            return number

    upstream.double = Counter()
    with pytest.raises(PatchError, match="was already replaced by"):
        a_patch().apply()


@pytest.mark.parametrize(
    ("changes", "missing"),
    [
        ({"symbol": "triple"}, r"upstreamlib\.triple is missing"),
        ({"symbol": "Thing.gone"}, r"Thing\.gone is missing"),
        ({"symbol": "Gone.method"}, r"upstreamlib\.Gone is missing"),
        ({"module": "upstreamlib.gone"}, r"upstreamlib\.gone is missing"),
        ({"module": "no_such_package_at_all"}, "no_such_package_at_all is missing"),
        ({"importers": ("no_such_importer",)}, "no_such_importer is missing"),
    ],
)
def test_names_what_is_missing(upstream, changes, missing):
    with pytest.raises(PatchError, match=missing) as error:
        a_patch(**changes).apply()
    assert "VSS_DISABLE_PATCHES=toy" in str(error.value)


def test_an_import_that_fails_inside_upstream_is_not_called_missing(tmp_path, monkeypatch):
    (tmp_path / "brokenlib.py").write_text("import no_such_dependency")
    monkeypatch.syspath_prepend(tmp_path)
    with pytest.raises(ModuleNotFoundError, match="no_such_dependency"):
        a_patch(module="brokenlib").apply()


def test_undone_when_the_fault_stays(upstream):
    original = upstream.double
    with pytest.raises(PatchError, match="still shows"):
        a_patch(probe=lambda: True).apply()
    assert upstream.double is original
    assert "toy" not in contract._places


def test_undone_when_the_probe_fails_afterwards(upstream):
    original = upstream.double

    def probe() -> bool:
        if upstream.double is not original:
            raise RuntimeError("broken probe")
        return True

    with pytest.raises(PatchError, match=r"probe of upstreamlib\.double failed after .*broken"):
        a_patch(probe=probe).apply()
    assert upstream.double is original


def test_a_probe_that_cannot_run_changes_nothing(upstream):
    original = upstream.double
    with pytest.raises(PatchError, match="failed before the change: ZeroDivisionError"):
        a_patch(probe=lambda: 1 // 0 == 1).apply()
    assert upstream.double is original


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


def test_apply_all_returns_a_status_each(upstream, monkeypatch):
    toys = (
        a_patch(name="on"),
        a_patch(name="off"),
        a_patch(name="aside", symbol="Thing.method", probe=lambda: False),
    )
    monkeypatch.setenv("VSS_DISABLE_PATCHES", " off ,")
    assert apply_all(toys) == {
        "on": Status.APPLIED,
        "off": Status.DISABLED,
        "aside": Status.NOT_NEEDED,
    }


def test_apply_all_leaves_nothing_behind_when_one_fails(upstream):
    original = upstream.double
    with pytest.raises(PatchError, match="'second'"):
        apply_all((a_patch(name="first"), a_patch(name="second", symbol="gone")))
    assert upstream.double is original


def test_all_switches_every_patch_off(monkeypatch):
    monkeypatch.setenv("VSS_DISABLE_PATCHES", "all")
    assert apply_all() == {patch.name: Status.DISABLED for patch in PATCHES}


def test_an_unknown_name_is_an_error_that_lists_the_known_ones(monkeypatch):
    monkeypatch.setenv("VSS_DISABLE_PATCHES", "sharded_state_init,shraded_state_load_model")
    with pytest.raises(OptionError, match="'shraded_state_load_model'") as error:
        apply_all()
    assert all(patch.name in str(error.value) for patch in PATCHES)


@pytest.mark.parametrize("patch", PATCHES, ids=lambda patch: patch.name)
def test_every_patch_is_described(patch):
    module = sys.modules[f"vllm_sharded_state.patches.{patch.name}"]
    for section in ("What", "Why", "How", "Since", "Until"):
        assert f"\n{section}: " in module.__doc__
    words = "".join(module.__doc__.split()).replace("`", "")
    assert patch.target in words


@pytest.mark.parametrize("patch", PATCHES, ids=lambda patch: patch.name)
def test_every_patch_heals_its_fault_alone_and_only_while_applied(patch):
    assert patch.probe()
    assert patch.apply() is Status.APPLIED
    assert not patch.probe()
    patch.undo()
    assert patch.probe()


def test_names_are_unique():
    assert len({patch.name for patch in PATCHES}) == len(PATCHES)
