"""Every test here starts from vLLM as it comes, and leaves it as it was found."""

from collections.abc import Iterator

import pytest

from vllm_sharded_state import patches
from vllm_sharded_state.patches import PATCHES, Patch, contract


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
def patch(request: pytest.FixtureRequest) -> Patch:
    """The patch that the test module names in `PATCH`."""
    (found,) = [p for p in patches.PATCHES if p.name == request.module.PATCH]
    return found
