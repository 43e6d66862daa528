"""What holds for every patch of the list, and for applying the list."""

import sys

import pytest

from tests.patches.toys import a_patch
from vllm_sharded_state.errors import OptionError, PatchError
from vllm_sharded_state.patches import PATCHES, apply_all, contract
from vllm_sharded_state.patches.contract import Status


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
