"""Layer-wise reload through every sort of callable, real per-head KV scales among them."""

import functools
import inspect
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from vllm.model_executor.layers.attention.attention import set_default_quant_scales
from vllm.model_executor.layers.attention_layer_base import AttentionLayerBase
from vllm.model_executor.layers.quantization.compressed_tensors import compressed_tensors
from vllm.model_executor.model_loader.reload import layerwise

from vllm_sharded_state.patches.layerwise_any_loader import PATCH, named

LOADED = [3.0, -1.5, 0.25]


def keyword_only(param: torch.Tensor, loaded_weight: torch.Tensor, *, factor: float) -> str:
    param.data.copy_(loaded_weight * factor)
    return "returned"


def plain(param: torch.Tensor, loaded_weight: torch.Tensor) -> str:
    param.data.copy_(loaded_weight)
    return "returned"


def other_names(destination: torch.Tensor, source: torch.Tensor) -> str:
    destination.data.copy_(source)
    return "returned"


def positional_only(destination: torch.Tensor, source: torch.Tensor, /) -> str:
    destination.data.copy_(source)
    return "returned"


def only_stars(*args: torch.Tensor, **kwargs: object) -> str:
    args[0].data.copy_(args[1])
    return "returned"


class Callable:
    def __call__(self, param: torch.Tensor, loaded_weight: torch.Tensor) -> str:
        param.data.copy_(loaded_weight)
        return "returned"


class WithoutSignature:
    """As a built-in function may be: callable, but inspect cannot tell how."""

    __name__ = "without_signature"
    __signature__ = property(lambda self: (_ for _ in ()).throw(ValueError("no signature")))

    def __call__(self, param: torch.Tensor, loaded_weight: torch.Tensor) -> str:
        param.data.copy_(loaded_weight)
        return "returned"


#: Each with the error stock gives, or None where stock leaves the weight unloaded in silence.
BROKEN_IN_STOCK = {
    "partial": (functools.partial(keyword_only, factor=1.0), AttributeError),
    "partial of a partial": (
        functools.partial(functools.partial(keyword_only, factor=2.0), factor=1.0),
        AttributeError,
    ),
    "callable object": (Callable(), AttributeError),
    "other names": (other_names, None),
    "lambda": (lambda p, w: other_names(p, w), None),
    "positional only": (positional_only, None),
    "only stars": (only_stars, None),
    "partial with other names": (functools.partial(other_names), AttributeError),
    "without signature": (WithoutSignature(), ValueError),
}


def reload_through(loader: Any, passed: Any = None) -> tuple[torch.nn.Parameter, Any]:
    layer = torch.nn.Module()
    layer.weight = torch.nn.Parameter(torch.full((3,), 7.0), requires_grad=False)
    layer.weight.weight_loader = loader
    weight = layer.weight
    layerwise.record_metadata_for_reloading(layer)
    layerwise.initialize_layerwise_reload(layer)
    result = layer.weight.weight_loader(layer.weight, torch.tensor(LOADED), **(passed or {}))
    layerwise.finalize_layerwise_reload(layer, None)
    assert layer.weight is weight
    return weight, result


@pytest.mark.parametrize("kind", BROKEN_IN_STOCK)
def test_stock_fails_or_loads_nothing(kind, monkeypatch):
    loader, error = BROKEN_IN_STOCK[kind]
    if error is not None:
        with pytest.raises(error):
            reload_through(loader)
        return
    # Fresh memory may hold anything, the loaded values too: give it a value of its own.
    stock = layerwise.materialize_layer

    def materialize_with_nines(layer: torch.nn.Module, info: Any) -> None:
        stock(layer, info)
        layer.weight.data.fill_(9.0)

    monkeypatch.setattr(layerwise, "materialize_layer", materialize_with_nines)
    weight, _ = reload_through(loader)
    assert weight.tolist() == [9.0, 9.0, 9.0]


@pytest.mark.parametrize("kind", BROKEN_IN_STOCK)
def test_any_callable_loads(kind):
    PATCH.apply()
    weight, result = reload_through(BROKEN_IN_STOCK[kind][0])
    assert weight.tolist() == LOADED
    assert result == "returned"


def test_keywords_of_the_call_reach_the_loader():
    PATCH.apply()
    weight, _ = reload_through(functools.partial(keyword_only, factor=1.0), {"factor": 2.0})
    assert weight.tolist() == [6.0, -3.0, 0.5]


@pytest.mark.parametrize("loader", [plain, layerwise.default_weight_loader, Callable().__call__])
def test_loaders_that_stock_can_use_are_passed_on_untouched(loader):
    PATCH.apply()
    assert layerwise._get_weight_loader(SimpleNamespace(weight_loader=loader)) is loader


def test_a_tensor_without_a_loader_keeps_upstreams_default():
    PATCH.apply()
    assert layerwise._get_weight_loader(torch.ones(1)) is layerwise.default_weight_loader


def test_the_wrapper_shows_what_it_wraps_and_is_not_wrapped_again():
    loader = functools.partial(keyword_only, factor=2.0)
    wrapper = named(loader)
    assert wrapper.__wrapped__ is loader
    assert inspect.signature(wrapper) == inspect.signature(loader)
    assert wrapper.__name__ != "online_process_loader"
    assert named(wrapper) is wrapper


@pytest.mark.parametrize(
    ("loader", "expected"),
    [
        (other_names, "(param, source: torch.Tensor)"),
        (positional_only, "(param, source: torch.Tensor, /)"),
        (only_stars, "(param, *args: torch.Tensor, **kwargs: object)"),
        (WithoutSignature(), "(param, *args, **kwargs)"),
        (lambda weight, param: None, "(weight, param)"),
    ],
)
def test_the_first_argument_is_called_param(loader, expected):
    signature = inspect.signature(named(loader))
    assert str(signature).partition(" ->")[0] == expected


def test_param_may_be_given_by_keyword():
    target = torch.zeros(3)
    named(other_names)(param=target, source=torch.tensor(LOADED))
    assert target.tolist() == LOADED
    named(functools.partial(keyword_only, factor=1.0))(
        param=target, loaded_weight=torch.tensor([1.0, 2.0, 3.0])
    )
    assert target.tolist() == [1.0, 2.0, 3.0]


# --- compressed-tensors, one KV scale a head ---------------------------------------------------------


class PerHeadAttention(torch.nn.Module, AttentionLayerBase):
    """An attention layer as far as loading goes, with upstream's own KV-cache method."""

    def __init__(self) -> None:
        super().__init__()
        self.num_kv_heads = 2
        self.kv_cache_dtype = "fp8"
        set_default_quant_scales(self, register_buffer=True)
        config = compressed_tensors.CompressedTensorsConfig.from_config(
            {
                "quant_method": "compressed-tensors",
                "format": "float-quantized",
                "config_groups": {},
                "ignore": [],
                "total_num_heads": 4,
                "total_num_kv_heads": 2,
                "kv_cache_scheme": {
                    "num_bits": 8,
                    "type": "float",
                    "strategy": "attn_head",
                    "symmetric": True,
                    "dynamic": False,
                },
            }
        )
        self.quant_method = compressed_tensors.CompressedTensorsKVCacheMethod(config)
        self.quant_method.create_weights(self)

    def process_weights_after_loading(self, act_dtype: torch.dtype) -> None:
        pass

    def get_attn_backend(self) -> Any:
        raise NotImplementedError

    def get_kv_cache_spec(self, vllm_config: Any) -> Any:
        raise NotImplementedError

    def fill(self, scales: dict[str, list[float]]) -> None:
        """Load as llm-compressor writes it: `[num_heads, 1, 1]`."""
        for name, values in scales.items():
            parameter = getattr(self, name)
            parameter.weight_loader(parameter, torch.tensor(values).view(-1, 1, 1))

    def buffers_by_name(self) -> dict[str, list[float] | float]:
        return {name: buffer.tolist() for name, buffer in self.named_buffers()}


@pytest.fixture
def model(monkeypatch) -> torch.nn.Module:
    """A model of one such layer on a single rank, loaded cold."""
    monkeypatch.setattr(compressed_tensors, "get_tensor_model_parallel_rank", lambda: 0)
    monkeypatch.setattr(compressed_tensors, "get_tensor_model_parallel_world_size", lambda: 1)
    model = torch.nn.Module()
    model.attn = PerHeadAttention()
    layerwise.record_metadata_for_reloading(model)
    model.attn.fill({"q_scale": [1, 2, 3, 4], "k_scale": [5, 6], "v_scale": [7, 8]})
    model.attn.quant_method.process_weights_after_loading(model.attn)
    return model


def test_stock_cannot_reload_per_head_scales(model):
    with pytest.raises(AttributeError, match="__name__"):
        layerwise.initialize_layerwise_reload(model)


def test_per_head_scales_reload_again_and_again(model):
    PATCH.apply()
    addresses = {name: buffer.data_ptr() for name, buffer in model.attn.named_buffers()}
    for step in (0.25, 0.5, 1.0):
        layerwise.initialize_layerwise_reload(model)
        model.attn.fill(
            {
                "q_scale": [2 * step, step, 3 * step, 4 * step],
                "q_zero_point": [0, 0, 0, 0],
                "k_scale": [6 * step, 5 * step],
                "v_scale": [7 * step, 9 * step],
            }
        )
        layerwise.finalize_layerwise_reload(model, SimpleNamespace(dtype=torch.bfloat16))
        assert model.attn.buffers_by_name() == {
            "_q_scale": [2 * step, 4 * step],  # the greatest of each KV head's two query heads
            "_k_scale": [6 * step, 5 * step],
            "_v_scale": [7 * step, 9 * step],
            "_prob_scale": 1.0,
        }
        assert model.attn._q_scale_float == 4 * step
        assert model.attn._k_scale_cpu.item() == 6 * step
        assert {n: b.data_ptr() for n, b in model.attn.named_buffers()} == addresses
        assert dict(model.attn.named_parameters()) == {}
