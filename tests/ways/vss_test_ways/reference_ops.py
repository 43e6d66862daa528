"""Plain-PyTorch stand-ins for the compiled CPU operators that a small dense decoder needs.

Schemas are those that vllm/_custom_ops.py and the CPU attention backend call (`torch.ops._C.*`).
Compare outputs only among processes that run in this way: attention differs from the compiled
kernel's by rounding, and FP8 rounds to nearest here.
"""

import itertools
from collections.abc import Callable
from typing import Any

import torch
from torch.library import Library

_LIBRARY = Library("_C", "FRAGMENT")

_FP8 = {
    "fp8": torch.float8_e4m3fn,
    "fp8_e4m3": torch.float8_e4m3fn,
    "fp8_e5m2": torch.float8_e5m2,
}


def init_cpu_memory_env(node_ids: list[int]) -> None:
    """Memory policy of NUMA nodes: nothing to do."""


def compute_slot_mapping(
    starts: torch.Tensor,
    positions: torch.Tensor,
    block_table: torch.Tensor,
    slot_mapping: torch.Tensor,
    block_size: int,
) -> None:
    bounds = starts.tolist()
    for row, (first, last) in enumerate(itertools.pairwise(bounds)):
        position = positions[first:last]
        block = block_table[row, position // block_size].to(slot_mapping.dtype)
        slot_mapping[first:last] = block * block_size + position % block_size


def get_scheduler_metadata(*_: Any) -> torch.Tensor:
    return torch.zeros(1, dtype=torch.int8)


def rotary_embedding(
    positions: torch.Tensor,
    query: torch.Tensor,
    key: torch.Tensor | None,
    head_size: int,
    cos_sin_cache: torch.Tensor,
    is_neox: bool,
    rope_dim_offset: int = 0,
    inverse: bool = False,
) -> None:
    if rope_dim_offset or inverse:
        raise NotImplementedError("rotary_embedding: offset and inverse have no stand-in")
    angles = cos_sin_cache[positions.flatten()].float()
    cos, sin = (half.unsqueeze(1) for half in angles.chunk(2, -1))
    rotary = angles.shape[-1]
    for tensor in (query, key):
        if tensor is None:
            continue
        heads = tensor.view(positions.numel(), -1, head_size)
        x = heads[..., :rotary].float()
        if is_neox:
            first, second = x.chunk(2, -1)
            turned = torch.cat((first * cos - second * sin, second * cos + first * sin), -1)
        else:
            first, second = x[..., ::2], x[..., 1::2]
            pairs = (first * cos - second * sin, second * cos + first * sin)
            turned = torch.stack(pairs, -1).flatten(-2)
        heads[..., :rotary] = turned.to(heads.dtype)


def reshape_and_cache(
    key: torch.Tensor,
    value: torch.Tensor,
    key_cache: torch.Tensor,
    value_cache: torch.Tensor,
    slot_mapping: torch.Tensor,
    isa: str,
    k_scale: float = 1.0,
    v_scale: float = 1.0,
    kv_cache_dtype: str = "auto",
) -> None:
    block_size = key_cache.shape[2]
    kept = slot_mapping >= 0
    block = (slot_mapping // block_size)[kept]
    offset = (slot_mapping % block_size)[kept]
    fp8 = _FP8.get(kv_cache_dtype)
    pairs = ((key, key_cache, k_scale), (value, value_cache, v_scale))
    for tensor, cache, scale in pairs:
        rows = tensor[: slot_mapping.numel()][kept]
        if fp8 is None:
            cache[block, :, offset] = rows.to(cache.dtype)
        else:
            limit = torch.finfo(fp8).max
            rows = (rows.float() / scale).clamp(-limit, limit).to(fp8)
            cache.view(torch.uint8)[block, :, offset] = rows.view(torch.uint8)


def attention(
    query: torch.Tensor,
    key_cache: torch.Tensor,
    value_cache: torch.Tensor,
    output: torch.Tensor,
    starts: torch.Tensor,
    seq_lens: torch.Tensor,
    scale: float,
    causal: bool,
    alibi_slopes: torch.Tensor | None,
    window: int,
    block_table: torch.Tensor,
    softcap: float,
    metadata: torch.Tensor,
    sinks: torch.Tensor | None,
    dynamic_causal: torch.Tensor | None = None,
    k_scale: float = 1.0,
    v_scale: float = 1.0,
    kv_cache_dtype: str = "auto",
) -> None:
    if alibi_slopes is not None or sinks is not None or dynamic_causal is not None or softcap:
        raise NotImplementedError("attention: alibi, sinks and soft caps have no stand-in")
    fp8 = _FP8.get(kv_cache_dtype)
    kv_heads, block_size = key_cache.shape[1], key_cache.shape[2]
    heads, head_dim = query.shape[1], query.shape[2]

    def cached(cache: torch.Tensor, blocks: torch.Tensor, length: int, by: float) -> torch.Tensor:
        taken = (cache if fp8 is None else cache.view(torch.uint8))[blocks]
        taken = taken.permute(1, 0, 2, 3).reshape(kv_heads, -1, head_dim)[:, :length]
        floats = taken.float() if fp8 is None else taken.contiguous().view(fp8).float() * by
        return floats.repeat_interleave(heads // kv_heads, 0)

    bounds = starts.tolist()
    for row, (first, last) in enumerate(itertools.pairwise(bounds)):
        length, new = int(seq_lens[row]), last - first
        if new == 0:
            continue
        blocks = block_table[row, : (length + block_size - 1) // block_size].long()
        keys = cached(key_cache, blocks, length, k_scale)
        values = cached(value_cache, blocks, length, v_scale)
        scores = torch.einsum("qhd,hnd->hqn", query[first:last].float(), keys) * scale
        asks = torch.arange(length - new, length).view(-1, 1)
        holds = torch.arange(length).view(1, -1)
        hidden = torch.zeros(new, length, dtype=torch.bool)
        if causal:
            hidden |= holds > asks
        if window > 0:
            hidden |= holds <= asks - window
        weights = scores.masked_fill(hidden, float("-inf")).softmax(-1)
        result = torch.einsum("hqn,hnd->qhd", weights, values)
        output[first:last] = result.view_as(output[first:last]).to(output.dtype)


def greedy_argmax(logits: torch.Tensor) -> torch.Tensor:
    return logits.argmax(-1).view(-1)


def static_scaled_fp8_quant(
    result: torch.Tensor,
    given: torch.Tensor,
    scale: torch.Tensor,
    group_shape: list[int] | None = None,
) -> None:
    if scale.numel() != 1:
        raise NotImplementedError("static_scaled_fp8_quant: only one scale a tensor")
    limit = torch.finfo(result.dtype).max
    result.copy_((given.float() / scale.reshape(())).clamp(-limit, limit).to(result.dtype))


_OPERATORS: tuple[tuple[str, Callable[..., Any]], ...] = (
    ("init_cpu_memory_env(SymInt[] node_ids) -> ()", init_cpu_memory_env),
    (
        "compute_slot_mapping_kernel_impl(Tensor query_start_loc, Tensor positions,"
        " Tensor block_table, Tensor(a3!) slot_mapping, SymInt block_size) -> ()",
        compute_slot_mapping,
    ),
    (
        "get_scheduler_metadata(int num_req, int num_heads_q, int num_heads_kv, int head_dim,"
        " Tensor seq_lens, ScalarType dtype, Tensor query_start_loc, bool casual,"
        " int window_size, str isa_hint, bool enable_kv_split, Tensor? dynamic_causal,"
        ' str kv_cache_dtype="auto") -> Tensor',
        get_scheduler_metadata,
    ),
    (
        "rotary_embedding(Tensor positions, Tensor(a1!) query, Tensor(a2!)? key, int head_size,"
        " Tensor cos_sin_cache, bool is_neox, int rope_dim_offset=0, bool inverse=False) -> ()",
        rotary_embedding,
    ),
    (
        "cpu_attn_reshape_and_cache(Tensor key, Tensor value, Tensor(a2!) key_cache,"
        " Tensor(a3!) value_cache, Tensor slot_mapping, str isa, float k_scale=1.0,"
        ' float v_scale=1.0, str kv_cache_dtype="auto") -> ()',
        reshape_and_cache,
    ),
    (
        "cpu_attention_with_kv_cache(Tensor query, Tensor key_cache, Tensor value_cache,"
        " Tensor(a3!) output, Tensor query_start_loc, Tensor seq_lens, float scale, bool causal,"
        " Tensor? alibi_slopes, SymInt sliding_window_size, Tensor block_table, float softcap,"
        " Tensor scheduler_metadata, Tensor? s_aux, Tensor? dynamic_causal, float k_scale=1.0,"
        ' float v_scale=1.0, str kv_cache_dtype="auto") -> ()',
        attention,
    ),
    ("greedy_argmax(Tensor logits) -> Tensor", greedy_argmax),
    (
        "static_scaled_fp8_quant(Tensor(a0!) result, Tensor input, Tensor scale,"
        " int[]? group_shape=None) -> ()",
        static_scaled_fp8_quant,
    ),
)


def _registered() -> set[str]:
    return {schema.name for schema in torch._C._jit_get_all_schemas()}


def define() -> None:
    """Define every operator that nothing has registered. Raises where a compiled one is in place."""
    taken = _registered()
    for schema, function in _OPERATORS:
        name = schema.split("(", 1)[0]
        if f"_C::{name}" in taken:
            if name in _DEFINED:
                continue
            raise RuntimeError(f"the compiled operator {name} is loaded: keep_out() was not called")
        _LIBRARY.define(schema)
        _LIBRARY.impl(name, function, "CompositeExplicitAutograd")
        _DEFINED.add(name)


_DEFINED: set[str] = set()
