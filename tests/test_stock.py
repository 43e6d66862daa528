"""Stock vLLM, our plugin disabled: the faults shown first, then what it can read of ours and we of it."""

from collections.abc import Callable

import pytest

from tests.support.lab import Zoo, explain
from tests.support.snapshot import differences
from tests.support.stock_lab import StockLab
from tests.zoo.kinds import KINDS, PACKED, REFERENCE, REFERENCES, TENSORS

pytestmark = pytest.mark.engine

StockLabs = Callable[[str], StockLab]

#: Where weights stay in tensors and nothing rewrites them, stock's own save comes back.
PLAIN = {"llama", "llama-bias", "llama-tied", "qwen3", "gemma2", "bert"}
COMES_BACK = {PACKED: set(), TENSORS: PLAIN, REFERENCE: PLAIN}
#: Stock loads these without a word, and the model holds other weights or scales.
SILENTLY_WRONG = {
    PACKED: set(),
    TENSORS: {"mixtral", "qwen3-moe", "gpt-oss", "llama-hand-set"},
    REFERENCE: {"llama-hand-set"},
}
#: Of what stock saved, this holds enough for us: all that the model reads is in tensors.
ENOUGH = PLAIN | {"llama-kv", "llama-kv-head", "llama-kv-auto", "llama-fp8-kv-only"}
#: The default run: one kind of each fault, and each that has two names for one tensor.
CHOSEN = {
    "llama",
    "llama-tied",
    "llama-kv",
    "llama-kv-head",
    "llama-fp8-kv-only",
    "llama-fp8-static-kv",
    "llama-hand-set",
    "llama-w8a8-kv",
    "llama-w4a16",
    "llama-lora",
    "mixtral",
    "qwen3-moe",
    "deepseek-v2",
}


def _cases(leave_out: str | None = None) -> list:  # type: ignore[type-arg]
    """(kind, way) pairs; those that the default run leaves out are marked `full`."""
    return [
        pytest.param(kind, way, marks=() if kind in CHOSEN else pytest.mark.full)
        for kind, way in REFERENCES
        if KINDS[kind].mutate is None or KINDS[kind].mutate != leave_out
    ]


ALL = _cases()
#: Hand-set scales are no part of the source checkpoint, so stock can't have them from source layout.
IN_SOURCE = _cases(leave_out="set_scales")


@pytest.fixture(scope="module")
def stock_labs(
    request: pytest.FixtureRequest, zoo: Zoo, tmp_path_factory: pytest.TempPathFactory
) -> StockLabs:
    root = tmp_path_factory.mktemp("stock")
    kinds: dict[str, set[str]] = {}
    for item in request.session.items:
        if "stock_labs" in getattr(item, "fixturenames", ()):
            given = item.callspec.params
            kinds.setdefault(given["way"], set()).add(given["kind"])
    labs: dict[str, StockLab] = {}

    def of(way: str) -> StockLab:
        if way not in labs:
            labs[way] = StockLab(way, zoo, root, kinds[way])
        return labs[way]

    return of


@pytest.mark.parametrize(("kind", "way"), ALL)
def test_stock_fails_where_it_does(stock_labs: StockLabs, kind: str, way: str) -> None:
    lab = stock_labs(way)
    saved = lab.saves[kind]
    if saved["error"] is not None:
        assert saved["error"]["stage"] == "save", explain(saved)
        assert kind not in COMES_BACK[way] | SILENTLY_WRONG[way]
        return
    loaded = lab.loads[kind]
    if loaded["error"] is not None:
        assert kind not in COMES_BACK[way] | SILENTLY_WRONG[way], explain(loaded)
        return
    changed = differences(loaded["snapshot"], saved["snapshot"])
    if changed:
        assert kind in SILENTLY_WRONG[way], changed[:5]
    else:
        assert kind in COMES_BACK[way], "stock does not fail here any more"


@pytest.mark.parametrize(("kind", "way"), ALL)
def test_what_stock_saved_loads_or_is_refused_by_name(
    stock_labs: StockLabs, kind: str, way: str
) -> None:
    lab = stock_labs(way)
    if lab.saves[kind]["error"] is not None:
        assert kind not in ENOUGH, "stock saved nothing to load"
        return
    loaded = lab.ours_load[kind]
    if loaded["error"] is None:
        assert differences(loaded["snapshot"], lab.saves[kind]["snapshot"]) == []
        return
    assert way == PACKED or kind not in ENOUGH, explain(loaded)
    assert "ShardedStateError" in loaded["error"]["bases"], explain(loaded)
    message = loaded["error"]["message"]
    assert "layers.0." in message or "layer.0." in message, message
    assert "ave it again" in message, message


@pytest.mark.parametrize(("kind", "way"), IN_SOURCE)
def test_source_layout_loads_in_stock(stock_labs: StockLabs, kind: str, way: str) -> None:
    lab = stock_labs(way)
    saved = lab.source_saves[kind]
    assert saved["error"] is None, explain(saved)
    loaded = lab.source_loads[kind]
    assert loaded["error"] is None, explain(loaded)
    assert differences(loaded["snapshot"], lab.saves[kind]["snapshot"]) == []
