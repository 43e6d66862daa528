"""Real engines that are given sharded state, and then say what one started from the new weights says."""

from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from tests.reload.checkpoints import updated
from tests.support.engine import Spec, run_engine
from tests.support.lab import WITH_OURS, without_ours
from tests.zoo.kinds import KINDS, PACKED

pytestmark = pytest.mark.engine


def test_an_engine_takes_the_sharded_state_of_another_or_its_own_again(tmp_path: Path) -> None:
    kind = KINDS["llama-kv-head"]
    old, new = kind.build().write(tmp_path / "old"), updated(kind.build()).write(tmp_path / "new")
    saved = str(tmp_path / "saved")
    engine = dict(kind.engine)
    saves = Spec(str(new), engine, save=saved)
    takes = Spec(str(old), engine, reload=[saved, str(old), saved])
    again = Spec(
        saved, engine | {"load_format": "sharded_state"}, mutate="rewrite_weights", reload=[None]
    )
    with ThreadPoolExecutor(2) as pool:  # two processes, side by side
        stock = pool.submit(run_engine, Spec(str(new), engine), PACKED, without_ours(PACKED))
        assert run_engine(saves, PACKED, WITH_OURS)["error"] is None
        fresh = stock.result()
        first, second = (pool.submit(run_engine, x, PACKED, WITH_OURS) for x in (takes, again))
        took, reread = first.result(), second.result()
    for result in (fresh, took, reread):
        assert result["error"] is None, result["error"]["traceback"]
    there, back, there_again = took["reloads"]
    (own,) = reread["reloads"]
    for step in (there, back, there_again, own):
        assert step["error"] is None, step["error"]
    assert took["outputs"] != fresh["outputs"] != reread["outputs"]
    assert there["outputs"] == there_again["outputs"] == own["outputs"] == fresh["outputs"]
    assert back["outputs"] == took["outputs"]
