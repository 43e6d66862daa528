"""Every test here starts from vLLM as it comes, and leaves it as it was found."""

import types
from collections.abc import Iterator

import pytest

from tests.patches.toys import FOREIGN, UPSTREAM, make_module
from vllm_sharded_state.patches import PATCHES, contract


@pytest.fixture(autouse=True)
def stock_vllm(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    for variable in ("VSS_LAYOUT", "VSS_DISABLE_PATCHES", "VSS_ALLOW_UNSUPPORTED_VLLM"):
        monkeypatch.delenv(variable, raising=False)
    were_applied = [patch for patch in PATCHES if patch.name in contract._places]
    for patch in PATCHES:
        patch.undo()
    yield
    for patch in PATCHES:
        patch.undo()
    for patch in were_applied:
        patch.apply()


@pytest.fixture
def upstream(monkeypatch: pytest.MonkeyPatch) -> Iterator[types.ModuleType]:
    before = dict(contract._places)
    yield make_module(monkeypatch, "upstreamlib", UPSTREAM)
    contract._places.clear()
    contract._places.update(before)


@pytest.fixture
def foreign(monkeypatch: pytest.MonkeyPatch) -> types.ModuleType:
    return make_module(monkeypatch, "foreignlib", FOREIGN)
