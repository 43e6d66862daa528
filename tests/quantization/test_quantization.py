"""Quantization methods of the tests' own: each comes back exactly, or is refused by name.

`tests.quantization.table` says which of the two. A model that loads with other state than the original
is a failure whatever the table says.
"""

from typing import Any

import pytest

from tests.quantization.lab import Case, MethodsLab, name, parts
from tests.quantization.table import (
    CHOSEN,
    EITHER,
    FEW_SEEDS,
    LATE,
    LAYOUTS,
    REFUSE,
    SCATTERED,
    SEEDS,
    TABLE,
    TRIP,
    UNKNOWABLE,
    VOLATILE,
)
from tests.support.lab import Result, explain
from tests.support.snapshot import differences

pytestmark = pytest.mark.engine

CASES: list[Case] = [(method, 0) for method in TABLE] + [("scattered", seed) for seed in SEEDS]


def _marks(case: Case, layout: str | None) -> Any:
    """The default run: `auto` of every method, everything of those chosen."""
    method, seed = case
    default = method in CHOSEN or (layout == "auto" and seed in FEW_SEEDS)
    return () if default else pytest.mark.full


PAIRS = [
    pytest.param(name(case), layout, marks=_marks(case, layout))
    for case in CASES
    for layout in LAYOUTS
]
STOCK = [
    pytest.param(name(case), marks=_marks(case, None))
    for case in CASES
    if case[0] not in UNKNOWABLE
]
SOURCE = [pytest.param(name(case), marks=_marks(case, None)) for case in CASES]
#: The modules that the methods apply to: a refusal has to name one of them.
LAYERS = tuple(
    f"model.layers.0.{part}"
    for part in (
        "self_attn.qkv_proj",
        "self_attn.o_proj",
        "self_attn.attn",
        "mlp.gate_up_proj",
        "block_sparse_moe",
    )
)
REFUSALS = {"NotRepresentableError", "StaleSourceError", "NoSourceError"}


@pytest.fixture(scope="module")
def lab(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> MethodsLab:
    """Runs what was collected, and no more."""
    given: dict[str, list[Any]] = {}
    for item in request.session.items:
        if item.path == request.path:
            values = item.callspec.params  # type: ignore[attr-defined]
            given.setdefault(item.originalname, []).append(values)  # type: ignore[attr-defined]
    pairs = [
        (values["case"], values["layout"])
        for test in (
            test_a_method_comes_back_or_is_refused,
            test_saving_leaves_the_live_model_as_it_was,
        )
        for values in given.get(test.__name__, ())
    ]
    stock, source = (
        [values["case"] for values in given.get(test.__name__, ())]
        for test in (
            test_what_stock_saved_comes_back_or_is_refused,
            test_stock_loads_source_layout_or_refuses,
        )
    )
    return MethodsLab(tmp_path_factory.mktemp("quantization"), pairs, stock, source)


def expected(case: str, layout: str) -> str:
    method, _ = parts(case)
    return TABLE.get(method, SCATTERED)[LAYOUTS.index(layout)]


def wrong(got: dict[str, Any], want: dict[str, Any]) -> list[str]:
    """How a loaded model differs from the original."""
    revealed = any(path.endswith(".revealed") for path in want["tensors"])
    return [
        line
        for line in differences(got, want)
        if not any(f"{attribute} " in line for attribute in VOLATILE)
        and (revealed or ".revealed is new" not in line)
    ]


def check_refusal(result: Result, stage: str = "save") -> None:
    """Refused for a cause of its own, and by a name: the module's, or the model's for shared state."""
    error = result["error"]
    assert error is not None
    assert error["stage"] == stage, explain(result)
    if stage == "save":
        assert error["type"] in REFUSALS, explain(result)
    else:
        assert "ShardedStateError" in error["bases"], explain(result)
    assert any(name in error["message"] for name in (*LAYERS, "lm_head", "LlamaForCausalLM")), (
        error["message"]
    )


@pytest.mark.parametrize(("case", "layout"), PAIRS)
def test_a_method_comes_back_or_is_refused(lab: MethodsLab, case: str, layout: str) -> None:
    saving = lab.saves[f"{case}.{layout}"]
    wanted = expected(case, layout)
    if saving["error"] is not None:
        check_refusal(saving)
        assert not (lab.saved(case, layout) / "sharded_state.json").exists()
        assert wanted != TRIP, explain(saving)
        return
    loading = lab.loads[f"{case}.{layout}"]
    if loading["error"] is not None and wanted == EITHER:
        # What no process can know of another shows at the latest when it is loaded.
        check_refusal(loading, "load")
        return
    assert loading["error"] is None, explain(loading)
    lines = wrong(loading["snapshot"], lab.truth(case, layout))
    if layout == "source" and lab.is_own_reference(case):
        # Processed anew, and so with another draw; it must compute the same all the same.
        lines = [line for line in lines if line.startswith("kernels: ")]
    assert lines == []
    assert wanted != REFUSE


@pytest.mark.parametrize(("case", "layout"), PAIRS)
def test_saving_leaves_the_live_model_as_it_was(lab: MethodsLab, case: str, layout: str) -> None:
    saving = lab.saves[f"{case}.{layout}"]
    if saving["error"] is not None:
        check_refusal(saving)
        return
    lines = differences(saving["snapshot_after"], saving["snapshot"])
    if parts(case)[0] in LATE:
        lines = [line for line in lines if line.startswith("kernels: ")]
    assert lines == []


@pytest.mark.parametrize("case", STOCK)
def test_what_stock_saved_comes_back_or_is_refused(lab: MethodsLab, case: str) -> None:
    saving = lab.stock_saves[case]
    if saving["error"] is not None:  # stock can't save strided tensors, for one
        assert saving["error"]["stage"] == "save", explain(saving)
        return
    loading = lab.loads[f"{case}.stock"]
    if loading["error"] is not None:
        check_refusal(loading, "load")
        return
    want = saving["snapshot"] if lab.is_own_reference(case) else lab.truth(case, "source")
    assert wrong(loading["snapshot"], want) == []


@pytest.mark.parametrize("case", SOURCE)
def test_stock_loads_source_layout_or_refuses(lab: MethodsLab, case: str) -> None:
    if lab.saves[f"{case}.source"]["error"] is not None:
        check_refusal(lab.saves[f"{case}.source"])
        return
    loading = lab.stock_loads[case]
    if loading["error"] is not None:
        # The directory holds what stock can't put in place, and keeps stock from loading it wrong.
        assert "vllm-sharded-state" in loading["error"]["message"], explain(loading)
        return
    lines = wrong(loading["snapshot"], lab.truth(case, "source"))
    if lab.is_own_reference(case):
        lines = [line for line in lines if line.startswith("kernels: ")]
    assert lines == []
