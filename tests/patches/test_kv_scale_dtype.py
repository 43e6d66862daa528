"""KV-cache scales stay float32 from the start, on every way to load them."""

import logging

import pytest
import torch
from vllm.model_executor.layers.quantization.kv_cache import (
    BaseKVCacheMethod,
    KVCacheScaleParameter,
)
from vllm.model_executor.model_loader.reload import (
    finalize_layerwise_reload,
    initialize_layerwise_reload,
    record_metadata_for_reloading,
)
from vllm.utils.torch_utils import set_default_torch_dtype

from tests.patches.layers import Layer, bfloat16, cold_scalar_layer, float32
from vllm_sharded_state.patches import (
    compressed_tensors_kv_pre_processed,
    kv_cache_pre_processed,
    kv_cache_scale_dtype,
)

SCALE_DTYPE = kv_cache_scale_dtype.PATCH
BASE = kv_cache_pre_processed.PATCH
COMPRESSED = compressed_tensors_kv_pre_processed.PATCH


def test_stock_rounds_scales_on_a_cold_load():
    assert cold_scalar_layer(k_scale=0.0123, v_scale=0.0456)._k_scale.item() == bfloat16(0.0123)
    assert bfloat16(0.0123) != float32(0.0123)


def test_scales_stay_float32_on_a_cold_load():
    SCALE_DTYPE.apply()
    layer = cold_scalar_layer(k_scale=0.0123, v_scale=0.0456, q_scale=0.0789, prob_scale=0.00321)
    assert {name: buffer.item() for name, buffer in layer.named_buffers()} == {
        "_k_scale": float32(0.0123),
        "_v_scale": float32(0.0456),
        "_q_scale": float32(0.0789),
        "_prob_scale": float32(0.00321),
    }
    assert layer._k_scale_float == layer._k_scale_cpu.item() == float32(0.0123)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32, torch.float64])
def test_the_parameter_is_upstreams_but_for_its_dtype(dtype):
    SCALE_DTYPE.apply()
    with set_default_torch_dtype(dtype):
        parameter = KVCacheScaleParameter()
        assert torch.get_default_dtype() == dtype
    assert type(parameter) is KVCacheScaleParameter
    assert (parameter.item(), parameter.shape, parameter.dtype, parameter.requires_grad) == (
        -1.0,
        (),
        torch.float32,
        False,
    )
    with torch.device("meta"):
        assert KVCacheScaleParameter().is_meta
    with pytest.raises(ValueError, match="expects a scalar"):
        parameter.weight_loader(parameter, torch.ones(2))


@pytest.mark.parametrize("default", [torch.bfloat16, torch.float32])
def test_an_update_gives_what_a_cold_load_gives(default):
    """Layer-wise reload keeps the metadata recorded at construction, or makes parameters anew."""
    SCALE_DTYPE.apply()
    scales = {"k_scale": 0.0123, "v_scale": 0.0456, "q_scale": 0.0789, "prob_scale": 0.00321}
    expected = cold_scalar_layer(**scales)

    with set_default_torch_dtype(torch.bfloat16):
        model = torch.nn.Module()
        model.attn = Layer(BaseKVCacheMethod(None))
        record_metadata_for_reloading(model)
        for name in scales:
            parameter = getattr(model.attn, name)
            parameter.weight_loader(parameter, torch.tensor(0.5))
        model.attn.quant_method.process_weights_after_loading(model.attn)
    assert model.attn._k_scale.item() == 0.5
    addresses = {name: buffer.data_ptr() for name, buffer in model.attn.named_buffers()}

    with set_default_torch_dtype(default):
        initialize_layerwise_reload(model)
        for name, value in scales.items():
            parameter = getattr(model.attn, name)
            parameter.weight_loader(parameter, torch.tensor(value, dtype=torch.float32))
        finalize_layerwise_reload(model, None)
    assert {name: buffer.item() for name, buffer in model.attn.named_buffers()} == {
        name: buffer.item() for name, buffer in expected.named_buffers()
    }
    assert model.attn.mirrors() == expected.mirrors()
    assert {name: buffer.data_ptr() for name, buffer in model.attn.named_buffers()} == addresses


@pytest.fixture
def told(monkeypatch):
    """What the patch logs."""
    lines: list[str] = []
    logger = logging.getLogger("vllm.sharded_state.patches")
    monkeypatch.setattr(logger, "info", lambda message, *args: lines.append(message % args))
    monkeypatch.setattr(kv_cache_scale_dtype, "_told", set())
    return lines


def test_a_changed_value_is_logged_once(told):
    SCALE_DTYPE.apply()
    cold_scalar_layer(k_scale=0.0123, v_scale=0.0456)
    cold_scalar_layer(k_scale=0.0789, v_scale=0.0456)
    (line,) = told
    assert "0.0123" in line
    assert f"{bfloat16(0.0123):.9g}" in line
    assert "bfloat16" in line


def test_values_that_bfloat16_holds_are_not_logged(told):
    SCALE_DTYPE.apply()
    cold_scalar_layer(k_scale=0.015625, v_scale=0.75)
    with set_default_torch_dtype(torch.float32):
        parameter = KVCacheScaleParameter()
        parameter.weight_loader(parameter, torch.tensor(0.0123))
    assert told == []
