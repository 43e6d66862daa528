"""The jobs of `test_sharded.py`: engines that are given the sharded state of another one."""

from typing import Any

from tests.reload.cases import GOOD, SAVED, case, sharded
from tests.zoo.kinds import KINDS, PACKED, REFERENCE, TENSORS

#: What is tried by default; the rest of the zoo is left to the full run.
_DEFAULT = {
    ("llama", TENSORS, "runtime"),
    ("llama", TENSORS, "source"),
    ("llama-kv-head", TENSORS, "runtime"),
    ("llama-tied", TENSORS, "runtime"),
    ("mixtral", TENSORS, "runtime"),
    ("gpt-oss", TENSORS, "source"),
    ("llama", PACKED, "auto"),
    ("llama-kv", PACKED, "auto"),
    ("llama-hand-set", PACKED, "auto"),
    ("llama-tied", PACKED, "auto"),
    ("llama-w8a8-kv", PACKED, "auto"),
    ("llama-w4a16", PACKED, "auto"),
    ("llama-lora", PACKED, "auto"),
    ("mixtral", PACKED, "auto"),
    ("deepseek-v2", PACKED, "auto"),
    ("llama-fp8-static-kv", REFERENCE, "runtime"),
    ("llama-fp8-static-kv", REFERENCE, "source"),
}

#: (job, is in the default run): the sharded state of the new weights, then the old checkpoint again.
#: What the kind changes by hand is in the sharded state, and not in the engine that takes it.
UPDATES = [
    (
        case(
            f"sharded {kind.name} {way} {layout}",
            kind.name,
            {"path": sharded(layout)},
            {"directory": "old"},
            way=way,
            mutate=None,
        ),
        (kind.name, way, layout) in _DEFAULT,
    )
    for kind in KINDS.values()
    for way, layouts in kind.layouts.items()
    for layout in layouts
]

_SHARDED = {"load_format": "sharded_state"}
_KV = {"kv_cache_dtype": "fp8"}
_MOVED = {"mutate": "rewrite_weights"}

#: Without a path: what the engine was started from; then what it was given last, of either kind.
OWN = [
    case(
        f"own {way}",
        "llama-kv",
        _MOVED | {"path": None},
        {"path": "new"},
        _MOVED | {"path": None},
        {"path": sharded(layout, checkpoint="old")},
        _MOVED | {"path": None},
        way=way,
        model=sharded(layout, checkpoint="old"),
        engine=_KV | _SHARDED,
    )
    for way, layout in ((PACKED, "auto"), (TENSORS, "runtime"))
]
#: Engines that were started otherwise, then what they were given last, without a path.
OTHERS = [
    case(
        f"given {load_format} {way}",
        "llama-kv",
        {"path": sharded(layout)},
        _MOVED | {"path": None},
        way=way,
        engine=_KV | {"load_format": load_format},
    )
    for load_format in ("auto", "dummy")
    for way, layout in ((PACKED, "auto"), (TENSORS, "runtime"))
]
TEN = case("sharded ten", "llama-kv-head", *[{"path": sharded("runtime")}, {"directory": "old"}] * 5,
           way=TENSORS)  # fmt: skip

#: Faults of a sharded state: (what, kind, way, layout, error, what it names, step, settings of the job).
_FAULTS: list[tuple[str, str, str, str, str, str, dict[str, Any], dict[str, Any]]] = [
    *(
        (what, "llama-kv-head", way, layout, error, named, {"spoil": what}, {})
        for way, layout in ((TENSORS, "runtime"), (TENSORS, "source"), (PACKED, "auto"))
        for what, error, named in (
            ("flip", "IncompleteError", "model.layers.1.mlp.down_proj.weight"),
            ("truncate", "IncompleteError", "model-rank-0-part-0.safetensors"),
            ("without_a_norm", "IncompleteError", "model.layers.1.input_layernorm.weight"),
            ("without_manifest", "ReloadSourceError", "sharded_state.json"),
            ("of_two_ranks", "MismatchError", "world.tensor_parallel_size: saved 2, here 1"),
            ("untied", "MismatchError", "Word embeddings"),
            ("other_results", "RestoreError", "Modules compute something else"),
        )
    ),
    ("nan_scale", "llama-kv-head", TENSORS, "runtime", "ReloadScaleError",
     "model.layers.1.self_attn.attn._k_scale", {"spoil": "nan_scale"}, {}),
    ("nan_scale", "llama-kv-head", PACKED, "auto", "ReloadScaleError",
     "model.layers.1.self_attn.attn._k_scale", {"spoil": "nan_scale"}, {}),
    ("nan_scale", "llama-kv", TENSORS, "source", "ReloadScaleError",
     "model.layers.1.self_attn.attn._k_scale", {"spoil": "nan_scale"}, {}),
    ("other model", "llama", TENSORS, "runtime", "MismatchError", "config.attention_bias",
     {"path": sharded("runtime", "llama-bias")}, {}),
    ("other cache", "llama", TENSORS, "runtime", "MismatchError", "runtime.kv_cache_dtype",
     {}, {"engine": _KV}),
    ("kept tensor", "llama", TENSORS, "runtime", "IncompleteError", "model.norm.own_columns",
     {}, {"mutate": "keep_views"}),
]  # fmt: skip
#: (job, error, what it names)
FAULTS = [
    (
        case(
            f"sharded fault {what} {way} {layout}",
            kind,
            {"path": sharded(layout)} | step,
            *([] if settings else [GOOD]),
            way=way,
            **settings,
        ),
        error,
        named,
    )
    for what, kind, way, layout, error, named, step, settings in _FAULTS
]
BY_LAYER = case(
    "sharded by layer",
    "llama",
    {"path": sharded("runtime"), "spoil": "flip", "atomic": "layer"},
    {"path": sharded("runtime"), "atomic": "layer"},
    way=TENSORS,
)
NO_ROOM = case(
    "sharded no room",
    "llama",
    {"path": sharded("runtime"), "available": 200_000},
    GOOD,
    way=TENSORS,
)
#: Saved again by the engine that was given it: its packed weights are read from there.
AGAIN = case(
    "sharded again",
    "llama-w8a8-kv",
    {"path": sharded("auto"), "save": SAVED},
)
STARTED_AGAIN = case("sharded again started", "llama-w8a8-kv", model=SAVED, engine=_KV | _SHARDED)
TOLD = case(
    "sharded told",
    "llama-kv",
    {"path": sharded("runtime"), "options": {"digest": True}},
    {"path": sharded("source"), "options": {"digest": True}},
    GOOD | {"options": {"digest": True}},
    way=TENSORS,
)
