"""What is remembered and decided while a model is built; the way from patches to the package."""

import importlib
import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import vllm.config.model
import vllm.config.vllm
from safetensors.torch import save_file
from vllm.config import VllmConfig, set_current_vllm_config
from vllm.model_executor.model_loader import utils
from vllm.model_executor.model_loader.reload.layerwise import LAYERWISE_INFO

from tests.patches.stand_ins import stand_for
from vllm_sharded_state.patches import (
    inward,
    remember_construction,
    untie_word_embeddings,
)

# --- inward ---------------------------------------------------------------


def test_inward_imports_when_called_and_hides_no_error(monkeypatch):
    assert inward.inward("envs", "layout")() == "auto"
    with pytest.raises(ModuleNotFoundError, match=r"vllm_sharded_state\.no_such_module"):
        inward.inward("no_such_module", "function")
    with pytest.raises(AttributeError, match="no_such_function"):
        inward.inward("envs", "no_such_function")


def test_a_stand_in_is_gone_after_its_block():
    with inward.stand_in("envs", "layout", lambda: "probe"):
        assert inward.inward("envs", "layout")() == "probe"
        with inward.stand_in("envs", "layout", lambda: "inner"):
            assert inward.inward("envs", "layout")() == "inner"
        assert inward.inward("envs", "layout")() == "probe"
    assert inward.inward("envs", "layout")() == "auto"


# --- remember_construction ---------------------------------------------------------------


def test_models_are_remembered_with_their_configuration(monkeypatch):
    remember_construction.PATCH.apply()
    remembered = stand_for(monkeypatch, "state.construction", "remember")
    vllm_config = VllmConfig()
    model = torch.nn.Linear(2, 2)
    with set_current_vllm_config(vllm_config):
        utils.record_metadata_for_reloading(model)
    assert remembered == [((model, vllm_config), {})]
    assert LAYERWISE_INFO[model].restore_metadata[0]["weight"].is_meta


def test_upstreams_function_is_left_alone_elsewhere():
    layerwise = importlib.import_module("vllm.model_executor.model_loader.reload.layerwise")
    stock = layerwise.record_metadata_for_reloading
    assert utils.record_metadata_for_reloading is stock
    remember_construction.PATCH.apply()
    assert utils.record_metadata_for_reloading is not stock
    assert layerwise.record_metadata_for_reloading is stock


# --- untie_word_embeddings ---------------------------------------------------------------


class Nested:
    """A configuration of two levels, both of which say whether the embeddings are tied."""

    def __init__(self, tied: bool) -> None:
        self.tie_word_embeddings = tied
        self.text = SimpleNamespace(tie_word_embeddings=tied)

    def get_text_config(self) -> Any:
        return self.text

    def levels(self) -> tuple[bool, bool]:
        return self.tie_word_embeddings, self.text.tie_word_embeddings


@pytest.fixture
def with_lm_head(tmp_path: Path) -> Path:
    """A directory whose weights hold an `lm_head.weight`, indexed as upstream looks for it."""
    save_file({"lm_head.weight": torch.ones(2, 2)}, tmp_path / "model.safetensors")
    index = {"metadata": {}, "weight_map": {"lm_head.weight": "model.safetensors"}}
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps(index))
    return tmp_path


def untie(directory: Path, tied: bool = True) -> tuple[Any, tuple[bool, bool]]:
    config = SimpleNamespace(
        model=str(directory),
        revision=None,
        hf_config=Nested(tied),
        word_embeddings_untied_by_checkpoint=False,
    )
    vllm.config.model.ModelConfig.maybe_untie_word_embeddings(config)
    return config, config.hf_config.levels()


def test_stock_unties_where_it_sees_the_key(with_lm_head):
    config, levels = untie(with_lm_head)
    assert levels == (False, False)
    assert config.word_embeddings_untied_by_checkpoint


@pytest.mark.parametrize(
    ("manifest", "levels", "compared_later"),
    [(True, (True, True), False), (False, (False, False), False), (None, (False, False), True)],
)
def test_the_manifest_decides(monkeypatch, with_lm_head, manifest, levels, compared_later):
    untie_word_embeddings.PATCH.apply()
    retie = stand_for(monkeypatch, "load", "retie")
    retie.answer = manifest
    config, found = untie(with_lm_head)
    assert retie == [((config,), {})]
    assert found == levels
    assert config.word_embeddings_untied_by_checkpoint is compared_later


@pytest.mark.parametrize("manifest", [True, False, None])
def test_an_untied_configuration_stays_untied(monkeypatch, with_lm_head, manifest):
    untie_word_embeddings.PATCH.apply()
    stand_for(monkeypatch, "load", "retie").answer = manifest
    config, levels = untie(with_lm_head, tied=False)
    assert levels == (False, False)
    assert not config.word_embeddings_untied_by_checkpoint
