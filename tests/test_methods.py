"""Quantization methods that do what CUDA methods do: each round-trips or is refused, none loads wrong.

`tests/methods/behaviours.py` says for each of them, and each layout, which of the two it must be.
"""

from pathlib import Path

import pytest

from tests.methods.behaviours import BEHAVIOURS
from tests.support.batch import Job, run_batch
from tests.support.lab import WITH_OURS, Result, explain, without_ours
from tests.support.snapshot import differences
from tests.zoo.decoders import llama
from tests.zoo.kinds import TENSORS

pytestmark = pytest.mark.engine

LAYOUTS = ("auto", "runtime", "source")
CASES = [(name, layout) for name in BEHAVIOURS for layout in LAYOUTS]
#: The first linear that is processed: an error has to name it.
FIRST = "model.layers.0.self_attn.qkv_proj"


class Results:
    """References, saves and loads of every behaviour, in a process each."""

    def __init__(self, root: Path) -> None:
        self.saved = root
        originals = {}
        for name in BEHAVIOURS:
            checkpoint = llama()
            checkpoint.config["quantization_config"] = {"quant_method": f"vss_{name}"}
            originals[name] = checkpoint.write(root / name)

        def job(name: str, directory: Path, **more: object) -> Job:
            return Job(**{"id": name, "model": str(directory), "register": "tests.methods"} | more)  # type: ignore[arg-type]

        self.references = run_batch(
            [job(name, path) for name, path in originals.items()], TENSORS, without_ours(TENSORS)
        )
        self.saves = run_batch(
            [
                job(
                    name,
                    originals[name],
                    id=f"{name}.{layout}",
                    save=str(root / f"{name}.{layout}"),
                    layout=layout,
                    snapshot_after=True,
                )
                for name, layout in CASES
            ],
            TENSORS,
            WITH_OURS,
        )
        self.loads = run_batch(
            [
                job(id_, root / id_, engine={"load_format": "sharded_state"})
                for id_, result in self.saves.items()
                if result["error"] is None
            ],
            TENSORS,
            WITH_OURS,
        )


@pytest.fixture(scope="module")
def results(tmp_path_factory: pytest.TempPathFactory) -> Results:
    return Results(tmp_path_factory.mktemp("methods"))


def _refused(result: Result) -> None:
    assert "ShardedStateError" in result["error"]["bases"], explain(result)
    assert FIRST in result["error"]["message"], explain(result)


@pytest.mark.parametrize(("name", "layout"), CASES)
def test_it_round_trips_or_is_refused_by_name(results: Results, name: str, layout: str) -> None:
    reference, saving = results.references[name], results.saves[f"{name}.{layout}"]
    assert reference["error"] is None, explain(reference)
    if not getattr(BEHAVIOURS[name], layout):
        assert saving["error"] is not None, f"{name} was saved in {layout} layout"
        _refused(saving)
        assert not (results.saved / f"{name}.{layout}" / "sharded_state.json").exists()
        return
    assert saving["error"] is None, explain(saving)
    assert differences(saving["snapshot_after"], saving["snapshot"]) == []
    loading = results.loads[f"{name}.{layout}"]
    assert loading["error"] is None, explain(loading)
    assert differences(loading["snapshot"], reference["snapshot"]) == []
