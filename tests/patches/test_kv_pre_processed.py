"""KV-cache scales that arrive already processed: kept, and every host copy rebuilt."""

import pytest
import torch
from vllm.model_executor.layers.quantization.compressed_tensors.compressed_tensors import (
    CompressedTensorsConfig,
    CompressedTensorsKVCacheMethod,
)
from vllm.model_executor.layers.quantization.kv_cache import (
    BaseKVCacheMethod,
)
from vllm.model_executor.utils import weights_already_processed

from tests.patches.layers import Layer, cold_scalar_layer, float32
from vllm_sharded_state.patches import (
    compressed_tensors_kv_pre_processed,
    kv_cache_pre_processed,
    kv_cache_scale_dtype,
)

SCALE_DTYPE = kv_cache_scale_dtype.PATCH
BASE = kv_cache_pre_processed.PATCH
COMPRESSED = compressed_tensors_kv_pre_processed.PATCH


# --- already processed, one scale a layer ----------------------------------------------------------


def test_stock_leaves_prob_scale_and_shares_the_buffer():
    layer = Layer(BaseKVCacheMethod(None))
    layer._prob_scale.fill_(0.125)
    with weights_already_processed():
        layer.quant_method.process_weights_after_loading(layer)
    assert layer._prob_scale_float == 1.0
    assert layer._k_scale_cpu.data_ptr() == layer._k_scale.data_ptr()


def test_scalar_scales_are_rebuilt():
    BASE.apply()
    SCALE_DTYPE.apply()
    layer = Layer(BaseKVCacheMethod(None))
    host = layer._k_scale_cpu
    values = {"q": 0.0789, "k": 0.0123, "v": 0.0456, "prob": 0.00321}
    for kind, value in values.items():
        getattr(layer, f"_{kind}_scale").fill_(value)
    with weights_already_processed():
        layer.quant_method.process_weights_after_loading(layer)
    assert layer.mirrors() == {
        "_q_scale_float": float32(0.0789),
        "_k_scale_float": float32(0.0123),
        "_v_scale_float": float32(0.0456),
        "_prob_scale_float": float32(0.00321),
        "_k_scale_cpu": float32(0.0123),
        "_v_scale_cpu": float32(0.0456),
    }
    assert layer._k_scale_cpu is host
    assert dict(layer.named_parameters()) == {}
    layer._k_scale.fill_(2.0)
    assert layer._k_scale_cpu.item() == float32(0.0123)


def test_the_base_method_takes_scales_per_head_and_drops_zero_points():
    BASE.apply()
    layer = Layer(BaseKVCacheMethod(None))
    layer.register_buffer("_k_scale", torch.tensor([0.25, 0.5, 0.125]))
    layer.k_zero_point = torch.nn.Parameter(torch.zeros(3))
    with weights_already_processed():
        layer.quant_method.process_weights_after_loading(layer)
    assert (layer._k_scale_float, layer._k_scale_cpu.item()) == (0.5, 0.5)
    assert layer._k_scale.tolist() == [0.25, 0.5, 0.125]
    assert dict(layer.named_parameters()) == {}


def test_a_host_tensor_that_is_the_buffer_is_parted_from_it():
    BASE.apply()
    layer = Layer(BaseKVCacheMethod(None))
    layer._k_scale.fill_(0.5)
    layer._k_scale_cpu = layer._k_scale
    del layer._v_scale_cpu
    with weights_already_processed():
        layer.quant_method.process_weights_after_loading(layer)
    layer._k_scale.fill_(2.0)
    assert (layer._k_scale_cpu.item(), layer._k_scale_cpu.dtype) == (0.5, torch.float32)
    assert layer._v_scale_cpu.item() == 1.0


def test_a_processed_layer_adopts_what_a_cold_load_left():
    """Every host copy equal to the cold load's, but the one that upstream forgets there."""
    BASE.apply()
    cold = cold_scalar_layer(k_scale=0.0123, v_scale=0.0456, q_scale=0.0789, prob_scale=0.5)
    fresh = Layer(BaseKVCacheMethod(None))
    for name, buffer in cold.named_buffers():
        getattr(fresh, name).copy_(buffer)
    with weights_already_processed():
        fresh.quant_method.process_weights_after_loading(fresh)
    assert cold._prob_scale_float == 1.0  # upstream's, with _prob_scale at 0.5
    assert fresh.mirrors() == cold.mirrors() | {"_prob_scale_float": 0.5}


def test_outside_of_the_mode_the_original_runs():
    scales = {"k_scale": 0.0123, "v_scale": 0.0456, "q_scale": 0.0789, "prob_scale": 0.5}
    stock = cold_scalar_layer(**scales)
    BASE.apply()
    patched = cold_scalar_layer(**scales)
    assert patched.mirrors() == stock.mirrors()
    assert {n: b.item() for n, b in patched.named_buffers()} == {
        n: b.item() for n, b in stock.named_buffers()
    }


# --- already processed, compressed-tensors -----------------------------------------------------------


def compressed_layer(strategy: str, num_kv_heads: int) -> Layer:
    config = CompressedTensorsConfig.from_config(
        {
            "quant_method": "compressed-tensors",
            "format": "float-quantized",
            "config_groups": {},
            "ignore": [],
            "total_num_heads": 2 * num_kv_heads,
            "total_num_kv_heads": num_kv_heads,
            "kv_cache_scheme": {
                "num_bits": 8,
                "type": "float",
                "strategy": strategy,
                "symmetric": True,
                "dynamic": False,
            },
        }
    )
    return Layer(CompressedTensorsKVCacheMethod(config), num_kv_heads)


SAVED = {
    "tensor": {"_k_scale": [0.0123], "_v_scale": [0.0456], "_q_scale": [0.0789]},
    "attn_head": {
        "_k_scale": [0.0123, 0.0234, 0.0034],
        "_v_scale": [0.0456, 0.0111, 0.0222],
        "_q_scale": [0.0012, 0.0789, 0.0678],
    },
}


def adopted(strategy: str) -> Layer:
    layer = compressed_layer(strategy, num_kv_heads=3)
    for name, values in SAVED[strategy].items():
        layer.register_buffer(name, torch.tensor(values, dtype=torch.float32))
    with weights_already_processed():
        layer.quant_method.process_weights_after_loading(layer)
    return layer


@pytest.mark.parametrize("strategy", ["tensor", "attn_head"])
def test_stock_replaces_loaded_scales_with_ones(strategy):
    layer = adopted(strategy)
    assert set(layer._k_scale.tolist()) == {1.0}


@pytest.mark.parametrize("strategy", ["tensor", "attn_head"])
def test_loaded_scales_are_kept(strategy):
    COMPRESSED.apply()
    layer = adopted(strategy)
    for name, values in SAVED[strategy].items():
        buffer = getattr(layer, name)
        assert buffer.tolist() == [float32(value) for value in values]
        assert name in dict(layer.named_buffers())
    greatest = {name: float32(max(values)) for name, values in SAVED[strategy].items()}
    assert layer.mirrors() == {
        "_q_scale_float": greatest["_q_scale"],
        "_k_scale_float": greatest["_k_scale"],
        "_v_scale_float": greatest["_v_scale"],
        "_k_scale_cpu": greatest["_k_scale"],
        "_v_scale_cpu": greatest["_v_scale"],
        "_prob_scale_float": 1.0,
    }
    assert layer._k_scale_cpu.shape == ()
    assert dict(layer.named_parameters()) == {}


@pytest.mark.parametrize("strategy", ["tensor", "attn_head"])
def test_a_cold_load_leaves_the_same(strategy):
    COMPRESSED.apply()
    cold = compressed_layer(strategy, num_kv_heads=3)
    for name, values in SAVED[strategy].items():
        getattr(cold, name.removeprefix("_")).data.copy_(torch.tensor(values))
    cold.quant_method.process_weights_after_loading(cold)
    warm = adopted(strategy)
    assert warm.mirrors() == cold.mirrors()
    for name, buffer in cold.named_buffers():
        assert torch.equal(getattr(warm, name), buffer)
        assert getattr(warm, name).shape == buffer.shape
