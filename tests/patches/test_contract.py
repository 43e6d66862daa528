"""The conditions under which a patch is made, on stand-ins for upstream."""

import pytest
import torch

from tests.patches.toys import FOREIGN, a_patch, make_module
from vllm_sharded_state.errors import PatchError
from vllm_sharded_state.patches import contract
from vllm_sharded_state.patches.contract import MARK, Status


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


def test_torchs_own_decorators_are_looked_through(upstream, foreign):
    """Upstream decorates with `torch.no_grad()`; so might somebody who replaced its function."""
    upstream.double = torch.no_grad()(upstream.double)
    assert a_patch().apply() is Status.APPLIED
    a_patch().undo()
    upstream.double = torch.no_grad()(foreign.wrap(upstream.double))
    with pytest.raises(PatchError, match=r"by foreignlib\.double"):
        a_patch().apply()


def test_refuses_a_foreign_wrapper_that_copied_upstreams_names(upstream, foreign):
    upstream.double = foreign.wrap(upstream.double)
    assert (upstream.double.__module__, upstream.double.__qualname__) == ("upstreamlib", "double")
    with pytest.raises(PatchError, match=r"by foreignlib\.double"):
        a_patch().apply()


def test_a_wrapper_of_upstreams_own_is_no_stranger(upstream, monkeypatch):
    """As `vllm.tracing.instrument` wraps `load_model` where OpenTelemetry is installed."""
    tracing = make_module(monkeypatch, "upstreamlib.tracing", FOREIGN)
    upstream.double = tracing.wrap(upstream.double)
    assert a_patch().apply() is Status.APPLIED
    assert upstream.double(5) == 10


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
