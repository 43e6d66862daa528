"""Each spoiled directory of the corpus is refused: by an error of ours that names file and cause."""

import re

import pytest

from tests.hostile.cases import CORPUS
from tests.hostile.goods import GROWTH, Yard
from tests.support import edit
from tests.support.lab import Result, explain
from tests.support.snapshot import differences

pytestmark = pytest.mark.engine

#: What Python says when something happens that nobody thought of.
LEAKED = re.compile(
    r"has no attribute|NoneType|not subscriptable|unhashable|unexpected keyword|Traceback|"
    r"(Key|Type|Attribute|Index|Recursion|Memory|Assertion)Error"
)


@pytest.fixture(scope="module")
def loads(request: pytest.FixtureRequest, yard: Yard) -> dict[str, Result]:
    """By case: what became of loading it, for all cases whose tests were collected."""
    jobs = []
    for number, name in enumerate(_collected(request)):
        case = CORPUS[name]
        directory = edit.copy(yard.good(case.base), yard.root / "cases" / str(number))
        case.change(directory)
        job = yard.job(case.base, directory, id=name)
        job.snapshot = job.kernels = case.loads is not None
        job.engine |= case.engine
        jobs.append((case.base, job))
    return yard.load(jobs)


def _collected(request: pytest.FixtureRequest) -> list[str]:
    """The cases of this module's tests that were collected; others have parameters called `case` too."""
    own = [
        item for item in request.session.items if getattr(item, "module", None) is request.module
    ]
    given = [item.callspec.params for item in own if hasattr(item, "callspec")]
    return [params["case"] for params in given if "case" in params]


def test_the_corpus_is_large() -> None:
    assert len(CORPUS) >= 300


@pytest.mark.parametrize("case", CORPUS)
def test_a_spoiled_directory(yard: Yard, loads: dict[str, Result], case: str) -> None:
    spoiled, result = CORPUS[case], loads[case]
    if spoiled.loads is not None:
        assert result["error"] is None, explain(result)
        like = yard.snapshots[spoiled.like or spoiled.base]["snapshot"]
        assert differences(result["snapshot"], like) == []
        return
    error = result["error"]
    assert error is not None, "it was loaded"
    assert error["stage"] == "load", explain(result)
    assert "ShardedStateError" in error["bases"], explain(result)
    for word in spoiled.words:
        assert word in error["message"]
    assert not LEAKED.search(error["message"]), error["message"]
    assert len(error["message"]) < 8000  # All fields of a config, with both values.
    assert result["peak_growth"] < GROWTH
