"""The model in memory is what gets saved: changed weights are carried, or the save is refused."""

from pathlib import Path

import pytest

from tests.support.batch import run_batch
from tests.support.lab import WITH_OURS, Result, Zoo, explain, sharded, without_ours
from tests.support.snapshot import differences
from tests.zoo.decoders import llama
from tests.zoo.kinds import PACKED, TENSORS

pytestmark = pytest.mark.engine

KIND = "llama"
DUMMY = {"load_format": "dummy"}


class Changed:
    """Saves of models that are not what their checkpoint holds, in one way."""

    def __init__(self, way: str, zoo: Zoo, root: Path) -> None:
        self.root, self.way = root, way
        overwritten = llama(vocab=250).write(root / "overwritten")
        other = llama(vocab=250, seed=1).write(root / "other")

        def save(name: str, layout: str, **more: object):  # type: ignore[no-untyped-def]
            return zoo.job(KIND, id=name, save=str(root / name), layout=layout, **more)

        layout = "auto" if way == PACKED else "runtime"
        self.saves = run_batch(
            [
                save("rewritten", layout, mutate="rewrite_weights"),
                save("rewritten source", "source", mutate="rewrite_weights"),
                save("dummy", layout, engine=DUMMY),
                save("gone", layout, model=str(overwritten), mutate="overwrite_source"),
            ],
            way,
            WITH_OURS,
            VSS_TEST_OVERWRITE=f"{overwritten}:{other}",
        )
        self.reference = run_batch(
            [zoo.job(KIND, mutate="rewrite_weights")], way, without_ours(way)
        )[KIND]
        saved = [name for name, result in self.saves.items() if result["error"] is None]
        self.loads = run_batch([sharded(KIND, root / n, id=n) for n in saved], way, WITH_OURS)


def _lab(way: str, zoo: Zoo, factory: pytest.TempPathFactory) -> Changed:
    return Changed(way, zoo, factory.mktemp(f"changed-{way}"))


@pytest.fixture(scope="module")
def packed(zoo: Zoo, tmp_path_factory: pytest.TempPathFactory) -> Changed:
    return _lab(PACKED, zoo, tmp_path_factory)


@pytest.fixture(scope="module")
def tensors(zoo: Zoo, tmp_path_factory: pytest.TempPathFactory) -> Changed:
    return _lab(TENSORS, zoo, tmp_path_factory)


def _refused(changed: Changed, name: str, error: str, module: str) -> None:
    result: Result = changed.saves[name]
    assert result["error"] is not None, "it was saved"
    assert result["error"]["type"] == error, explain(result)
    assert module in result["error"]["message"]
    assert not (changed.root / name / "sharded_state.json").exists()


def test_runtime_layout_carries_weights_that_were_changed(tensors: Changed) -> None:
    saving = tensors.saves["rewritten"]
    assert saving["error"] is None, explain(saving)
    loading = tensors.loads["rewritten"]
    assert loading["error"] is None, explain(loading)
    assert differences(loading["snapshot"], tensors.reference["snapshot"]) == []


def test_source_layout_carries_them_too_or_is_refused(tensors: Changed) -> None:
    """Where processing changes nothing, the live tensors are the source; else they would be lost."""
    if tensors.saves["rewritten source"]["error"] is not None:
        _refused(tensors, "rewritten source", "StaleSourceError", "model.")
        return
    loading = tensors.loads["rewritten source"]
    assert loading["error"] is None, explain(loading)
    assert differences(loading["snapshot"], tensors.reference["snapshot"]) == []


@pytest.mark.parametrize("name", ["rewritten", "rewritten source"])
def test_a_packed_copy_of_other_bytes_is_refused(packed: Changed, name: str) -> None:
    """The embedding's weight was changed; the copy that the kernel reads was not."""
    _refused(packed, name, "StaleSourceError", "model.embed_tokens")


def test_a_source_that_was_overwritten_is_noticed(packed: Changed, tensors: Changed) -> None:
    _refused(packed, "gone", "StaleSourceError", "model.")
    # In runtime layout nothing is read again.
    assert tensors.saves["gone"]["error"] is None, explain(tensors.saves["gone"])
    before = tensors.saves["gone"]["snapshot"]
    assert differences(tensors.loads["gone"]["snapshot"], before) == []


def test_without_a_source_to_read_again(packed: Changed, tensors: Changed) -> None:
    _refused(packed, "dummy", "NoSourceError", "model.")
    saving = tensors.saves["dummy"]
    assert saving["error"] is None, explain(saving)
    assert differences(tensors.loads["dummy"]["snapshot"], saving["snapshot"]) == []
