"""`ShardedStateLoader` hands its calls over to this package."""

import importlib
import sys
import types
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import save_file
from vllm.config.load import LoadConfig
from vllm.model_executor.model_loader import get_model_loader, sharded_state_loader
from vllm.model_executor.model_loader.sharded_state_loader import ShardedStateLoader

from tests.patches.stand_ins import stand_for
from vllm_sharded_state.patches import (
    sharded_state_init,
    sharded_state_load_model,
    sharded_state_load_weights,
    sharded_state_save_model,
)

#: The load formats that share the class.
FORMATS = ("sharded_state", "runai_streamer_sharded")


def load_config(load_format: str = "sharded_state", **extra: Any) -> LoadConfig:
    return LoadConfig(load_format=load_format, model_loader_extra_config=extra)


@pytest.fixture
def one_rank(monkeypatch):
    """The parallel state of a process that is alone."""
    group = SimpleNamespace(world_size=1)
    for name, value in {
        "get_pp_group": lambda: group,
        "get_tp_group": lambda: group,
        "get_pipeline_model_parallel_rank": lambda: 0,
        "get_tensor_model_parallel_rank": lambda: 0,
    }.items():
        monkeypatch.setattr(f"vllm.distributed.{name}", value)


# --- sharded_state_init ---------------------------------------------------------------


@pytest.mark.parametrize("key", ["strict", "layout"])
def test_stock_refuses_our_keys(key):
    with pytest.raises(ValueError, match="Unexpected extra config keys"):
        ShardedStateLoader(load_config(**{key: True}))


@pytest.mark.parametrize("load_format", FORMATS)
def test_options_are_taken_and_upstream_gets_the_rest(monkeypatch, load_format):
    sharded_state_init.PATCH.apply()
    take = stand_for(monkeypatch, "load", "take_options")
    take.answer = (load_config(load_format, pattern="x-{rank}-{part}"), "the options")
    config = load_config(load_format, pattern="x-{rank}-{part}", strict=False)
    loader = get_model_loader(config)
    assert type(loader) is ShardedStateLoader
    assert take == [((config,), {})]
    assert (loader.vss_options, loader.pattern) == ("the options", "x-{rank}-{part}")


def test_errors_about_options_reach_the_caller(monkeypatch):
    sharded_state_init.PATCH.apply()

    def refuse(config: LoadConfig) -> None:
        raise ValueError("unknown keys: a, b")

    stand_in = types.ModuleType("vllm_sharded_state.load")
    stand_in.take_options = refuse
    monkeypatch.setitem(sys.modules, "vllm_sharded_state.load", stand_in)
    with pytest.raises(ValueError, match="unknown keys: a, b"):
        get_model_loader(load_config(b=1, a=2))


def test_the_docstring_documents_each_key():
    sharded_state_init.PATCH.apply()
    for key in ("`pattern`", "`strict`", "`layout`"):
        assert key in ShardedStateLoader.__init__.__doc__


# --- sharded_state_load_model ---------------------------------------------------------------


class Notebook(ShardedStateLoader):
    """Notes the order of the steps of upstream's `load_model`, then stops."""

    def __init__(self, load_format: str) -> None:
        self.load_config = LoadConfig(load_format=load_format, device="cpu")
        self.steps: list[str] = []

    def create_model(self, **kwargs: Any) -> torch.nn.Module:
        self.steps.append(f"create {kwargs['prefix']!r}")
        return torch.nn.Module()

    def load_weights(self, model: torch.nn.Module, model_config: Any) -> None:
        self.steps.append("load")
        raise InterruptedError


VLLM_CONFIG: Any = SimpleNamespace(load_config=LoadConfig(device="cpu"), device_config=None)
MODEL_CONFIG: Any = SimpleNamespace(dtype=torch.float32)


@pytest.mark.parametrize("load_format", FORMATS)
def test_load_model_is_handed_over(monkeypatch, load_format):
    sharded_state_load_model.PATCH.apply()
    load = stand_for(monkeypatch, "load", "load_model")
    load.answer = torch.nn.Linear(1, 1)
    loader = Notebook(load_format)
    result = loader.load_model(VLLM_CONFIG, MODEL_CONFIG, prefix="draft")
    assert result is load.answer
    ((args, kwargs),) = load
    assert args[:4] == (loader, VLLM_CONFIG, MODEL_CONFIG, "draft")
    assert kwargs == {}
    assert loader.steps == []
    with pytest.raises(InterruptedError):
        args[4](VLLM_CONFIG, MODEL_CONFIG, "draft")
    assert loader.steps == ["create 'draft'", "load"]


def test_load_model_by_keyword_as_vllm_calls_it(monkeypatch):
    sharded_state_load_model.PATCH.apply()
    load = stand_for(monkeypatch, "load", "load_model")
    Notebook("sharded_state").load_model(vllm_config=VLLM_CONFIG, model_config=MODEL_CONFIG)
    assert load[0][0][1:4] == (VLLM_CONFIG, MODEL_CONFIG, "")


def test_other_loaders_keep_the_inherited_method():
    base = importlib.import_module("vllm.model_executor.model_loader.base_loader").BaseModelLoader
    before = vars(base)["load_model"]
    sharded_state_load_model.PATCH.apply()
    assert vars(base)["load_model"] is before
    assert ShardedStateLoader.load_model is not before


# --- sharded_state_load_weights ---------------------------------------------------------------


class Scaled(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.k_scale = torch.nn.Parameter(torch.tensor(-1.0), requires_grad=False)
        self.register_buffer("_k_scale", torch.tensor(1.0))


@pytest.fixture
def saved(tmp_path: Path) -> Any:
    """A sharded state that holds the processed scale alone, and its model config."""
    save_file({"_k_scale": torch.tensor(0.5)}, tmp_path / "model-rank-0-part-0.safetensors")
    return SimpleNamespace(model=str(tmp_path), model_weights=None)


def test_stock_misses_the_parameter_of_a_processed_scale(one_rank, saved):
    with pytest.raises(ValueError, match=r"Missing keys \('k_scale',\)"):
        ShardedStateLoader(load_config()).load_weights(Scaled(), saved)


@pytest.mark.parametrize("load_format", FORMATS)
def test_load_weights_is_handed_over(monkeypatch, one_rank, saved, load_format):
    sharded_state_load_weights.PATCH.apply()
    load = stand_for(monkeypatch, "load", "load_weights")
    loader, model = ShardedStateLoader(load_config(load_format)), Scaled()
    assert loader.load_weights(model, saved) is None
    ((args, _),) = load
    assert args[:3] == (loader, model, saved)
    assert model._k_scale.item() == 1.0
    monkeypatch.setattr(  # the streamer's own, which needs a package that upstream leaves to users
        sharded_state_loader,
        "runai_safetensors_weights_iterator",
        lambda *_: [("_k_scale", torch.tensor(0.5))],
    )
    with pytest.raises(ValueError, match=r"Missing keys \('k_scale',\)"):
        args[3](model, saved)
    assert model._k_scale.item() == 0.5


# --- sharded_state_save_model ---------------------------------------------------------------


def packed_model() -> torch.nn.Module:
    model = torch.nn.Linear(2, 2)
    model.weight = torch.nn.Parameter(torch.empty(0), requires_grad=False)
    return model


def test_stock_saves_a_packed_model_without_its_weight(one_rank, tmp_path):
    ShardedStateLoader.save_model(packed_model(), str(tmp_path))
    with safe_open(tmp_path / "model-rank-0-part-0.safetensors", framework="pt") as file:
        assert list(file.keys()) == ["bias"]


@pytest.mark.parametrize(
    ("keywords", "expected"),
    [({}, (None, None)), ({"pattern": "p", "max_size": 7}, ("p", 7)), ({"max_size": 7}, (None, 7))],
)
def test_save_model_is_handed_over(monkeypatch, tmp_path, keywords, expected):
    sharded_state_save_model.PATCH.apply()
    save = stand_for(monkeypatch, "save", "save_model")
    model = packed_model()
    assert ShardedStateLoader.save_model(model, str(tmp_path), **keywords) is None
    assert save == [((model, str(tmp_path), *expected), {})]
    assert list(tmp_path.iterdir()) == []
