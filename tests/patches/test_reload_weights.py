"""The patch of `reload_weights`: handed over, left to upstream where it must be, in every importer."""

import logging
import sys
from types import ModuleType, SimpleNamespace

import pytest
import torch
from vllm.model_executor.model_loader.reload import inplace

from tests.support import manifests
from vllm_sharded_state.checkpoint.manifest import Manifest, RankEntry
from vllm_sharded_state.errors import ReloadSourceError
from vllm_sharded_state.patches import reload_weights
from vllm_sharded_state.patches.inward import stand_in


@pytest.fixture
def applied():
    reload_weights.PATCH.apply()
    yield
    reload_weights.PATCH.undo()


def test_arguments_arrive_under_upstreams_names(applied):
    calls = []
    model = torch.nn.Module()
    with (
        stand_in("reload.unsupported", "reason", lambda *_: None),
        stand_in("reload.entry", "reload_weights", lambda *args: calls.append(args)),
    ):
        inplace.reload_weights(
            "config", model, weights_iterator=None, weights_path="path", is_checkpoint_format=True
        )
        inplace.reload_weights("config", model, "weights", None, False)
    assert calls == [
        ("config", model, None, "path", True),
        ("config", model, "weights", None, False),
    ]


def test_what_is_not_supported_is_left_to_upstream_with_a_warning(caplog, monkeypatch):
    calls = []
    patched = reload_weights.make(lambda *args: calls.append(args))
    monkeypatch.setattr(logging.getLogger("vllm"), "propagate", True)
    with stand_in("reload.unsupported", "reason", lambda *_: "it is odd"):
        patched("config", "model", "weights", None, True)
    assert calls == [("config", "model", "weights", None, True)]
    assert "it is odd" in caplog.text


def test_upstreams_reload_is_not_given_a_sharded_state(tmp_path):
    calls = []
    patched = reload_weights.make(lambda *args: calls.append(args))
    saved = RankEntry(0)
    found = Manifest(
        written_by={}, binding={}, tied_word_embeddings=False, ranks=[saved], save_id="0" * 16
    )
    manifests.write(tmp_path, found)
    names = {"model": "elsewhere", "model_weights": "", "revision": None}
    config = SimpleNamespace(
        model_config=SimpleNamespace(**names), load_config=SimpleNamespace(load_format="auto")
    )
    config.load_config.download_dir = None
    with (
        stand_in("reload.unsupported", "reason", lambda *_: "it is odd"),
        pytest.raises(ReloadSourceError, match="it is odd"),
    ):
        patched(config, "model", None, str(tmp_path), True)
    assert calls == []


def test_a_runner_that_imported_it_by_value_gets_it_too(monkeypatch):
    (name, *_) = reload_weights.PATCH.importers_if_loaded
    runner = ModuleType(name)
    runner.reload_weights = original = inplace.reload_weights
    monkeypatch.setitem(sys.modules, name, runner)
    reload_weights.PATCH.apply()
    try:
        assert runner.reload_weights is inplace.reload_weights is not original
    finally:
        reload_weights.PATCH.undo()
    assert runner.reload_weights is inplace.reload_weights is original


def test_a_runner_that_is_not_imported_stays_so(monkeypatch):
    for name in reload_weights.PATCH.importers_if_loaded:
        monkeypatch.delitem(sys.modules, name, raising=False)
    reload_weights.PATCH.apply()
    reload_weights.PATCH.undo()
    assert not set(reload_weights.PATCH.importers_if_loaded) & sys.modules.keys()


def test_the_runners_take_it_by_value_under_this_name():
    """What `importers_if_loaded` lists is so in this version of vLLM."""
    import ast
    from importlib.util import find_spec
    from pathlib import Path

    for name in reload_weights.PATCH.importers_if_loaded:
        tree = ast.parse(Path(find_spec(name).origin).read_text())
        imported = {
            alias.name
            for node in ast.walk(tree)
            if isinstance(node, ast.ImportFrom) and node.module == inplace.__name__
            for alias in node.names
            if alias.asname is None
        }
        assert "reload_weights" in imported
