"""Every job of the reload tests: which model, and what is sent to it, step by step.

A name that begins with `stock ` runs without our plugin too, to show the fault.
"""

from collections.abc import Callable
from typing import Any

from tests.reload.kinds import MORE
from tests.reload.lab import ReloadLab
from tests.reload.steps import Job
from tests.zoo.kinds import KINDS, PACKED, REFERENCE, TENSORS

Make = Callable[[ReloadLab], Job]

JOBS: dict[str, Make] = {}
_CHECKPOINTS = ("old", "new", "truncated")
#: Stands for where a step saves what it was given.
SAVED, DEFAULTS, MIXTURE = "saved", "saved with default scales", "saved meanwhile"
_WAYS: dict[str, str] = {}
_KINDS: dict[str, str] = {}


def way_of(job: str) -> str:
    return _WAYS[job]


def kind_of(job: str) -> str:
    return _KINDS[job]


def sharded(layout: str = "auto", kind: str = "", checkpoint: str = "new") -> dict[str, str]:
    """Stands for the path of a sharded state: of the job's own kind, unless another is named."""
    return {"layout": layout, "kind": kind, "checkpoint": checkpoint}


def case(name: str, kind: str, *steps: dict[str, Any], way: str = PACKED, **more: Any) -> str:
    """Register a job; steps that send nothing named send the new checkpoint of the kind."""

    def make(lab: ReloadLab) -> Job:
        def found(place: Any) -> Any:
            if isinstance(place, dict):
                return str(lab.sharded(place["kind"] or kind, place["layout"], place["checkpoint"]))
            if place == "exact":
                return str(lab.exact())
            if place in (SAVED, DEFAULTS, MIXTURE):
                return str(lab.root / lab.way / place)
            return str(getattr(lab, place)(kind)) if place in _CHECKPOINTS else place

        def whole(step: dict[str, Any]) -> dict[str, Any]:
            step = dict(step)
            for key in ("directory", "path", "save"):
                if key in step:
                    step[key] = found(step[key])
            if not {"directory", "path", "kernel_format"} & step.keys():
                step["directory"] = str(lab.new(kind))
            return step

        settings = dict(more)
        for key in ("model", "save"):
            if key in settings:
                settings[key] = found(settings[key])
        return lab.job(name, kind, *map(whole, steps), **settings)

    JOBS[name], _WAYS[name], _KINDS[name] = make, way, kind
    return name


#: Between them every way that weights are kept; the rest of the zoo is left to the full run.
_DEFAULT = {
    PACKED: {
        "llama-tied",
        "llama-hand-set",
        "llama-kv-head",
        "llama-fp8-kv-only",
        "llama-w8a8-static",
        "llama-w4a16",
        "llama-lora",
        "mixtral",
        "deepseek-v2",
        "llama-online",
        "paligemma",
    },
    TENSORS: {"llama", "llama-kv", "gpt-oss", "bert"},
    REFERENCE: set(),
}

WITH_DIGEST: dict[str, Any] = {"options": {"digest": True}}
#: (job, is in the default run) for each kind in each way: the new weights, then the old ones again.
UPDATES = [
    (
        case(f"update {kind.name} {way}", kind.name, WITH_DIGEST, {"directory": "old"}, way=way),
        kind.name in _DEFAULT[way],
    )
    for kind in (*KINDS.values(), MORE["llama-online"], MORE["paligemma"])
    for way in kind.layouts
]

GOOD: dict[str, Any] = {}
Q0 = r"layers\.0\.self_attn\.q_proj\.weight"
V_SCALE, K_SCALE = r"\.v_scale$", r"\.k_scale$"

# The faults of stock vLLM, by the number that issue 4 gives them.
IDENTICAL = case("stock 1", "llama-fp8-kv-only", {"directory": "exact"}, model="exact")
PER_HEAD = case("stock 2", "llama-kv-head", GOOD)
INT8 = case("stock 3", "llama-w8a8", GOOD)
PART = case("stock 4", "llama", {"only": Q0}, GOOD, way=TENSORS)
PART_QUANTIZED = case("stock 4b", "llama-w4a16", {"drop": r"0\.self_attn\.v_proj\."}, GOOD)
V_ONLY = case("stock 5", "llama-fp8-kv-only", {"only": V_SCALE}, GOOD)
K_ONLY = case("stock 5b", "llama-kv", {"only": K_SCALE}, GOOD)
HALFWAY = case("stock 6", "llama", {"raise_at": 9}, GOOD)
HAND_SET = case("stock 7", "llama-hand-set", GOOD)
UNQUANTIZED_SCALE = case(
    "stock 7b",
    "llama-hand-set",
    {
        "add": {"model.layers.1.self_attn.k_scale": "model.layers.0.input_layernorm.weight"},
        "only": "k_scale",
        "shape": {"model.layers.1.self_attn.k_scale": [1]},
        "fill": {"k_scale": 0.375},
    },
)
DUMMY = case(
    "stock 8",
    "llama-kv",
    {"drop": "_scale|zero_point"},
    GOOD,
    engine={"kv_cache_dtype": "fp8", "load_format": "dummy"},
)
BUFFERS = case(
    "stock 10",
    "llama-kv",
    {"kernel_format": True, "only": r"_scale$", "times": 2.0},
    way=TENSORS,
)

#: Faults in what is sent: (kind, what the error has to name, error, step).
_FAULTS: list[tuple[str, str, str, str, dict[str, Any]]] = [
    ("unknown", "llama", "UnexpectedError", "model.nowhere.weight",
     {"add": {"model.nowhere.weight": "model.norm.weight"}}),
    ("twice", "llama", "UnexpectedError", "model.norm.weight", {"again": "model.norm.weight"}),
    ("rows", "llama", "MismatchError", "layers.0.self_attn.k_proj.weight",
     {"shape": {"model.layers.0.self_attn.k_proj.weight": [128, 128]}}),
    ("fewer rows", "llama", "MismatchError", "layers.0.mlp.down_proj.weight",
     {"shape": {"model.layers.0.mlp.down_proj.weight": [64, 192]}}),
    ("one number", "llama", "MismatchError", "model.norm.weight",
     {"shape": {"model.norm.weight": [1]}}),
    ("dtype", "llama", "MismatchError", "layers.1.mlp.up_proj.weight",
     {"dtype": {"model.layers.1.mlp.up_proj.weight": "int8"}}),
    ("fp8", "llama", "MismatchError", "layers.1.mlp.up_proj.weight",
     {"dtype": {"model.layers.1.mlp.up_proj.weight": "float8_e4m3fn"}}),
    ("missing", "llama", "IncompleteError", "model.layers.1.mlp.gate_proj.weight",
     {"drop": r"layers\.1\.mlp\.gate_proj"}),
    ("missing bias", "llama-bias", "IncompleteError", "model.layers.0.self_attn.o_proj.bias",
     {"drop": r"layers\.0\.self_attn\.o_proj\.bias"}),
    ("missing scale", "llama-w8a8-kv", "IncompleteError", "layers.0.mlp.up_proj.weight_scale",
     {"drop": r"layers\.0\.mlp\.up_proj\.weight_scale"}),
    ("missing expert", "mixtral", "IncompleteError", "layers.0.block_sparse_moe.experts.2.w3.weight",
     {"drop": r"layers\.0\.block_sparse_moe\.experts\.2\.w3"}),
    ("nan", "llama-w8a8-kv", "ScaleError", "layers.1.self_attn.v_scale",
     {"fill": {r"layers\.1\.self_attn\.v_scale": float("nan")}}),
    ("inf", "llama-kv-head", "ScaleError", "layers.1.self_attn.k_scale",
     {"fill": {r"layers\.1\.self_attn\.k_scale": float("inf")}}),
    ("zero", "llama-kv-head", "ScaleError", "layers.0.self_attn.q_scale",
     {"fill": {r"layers\.0\.self_attn\.q_scale": 0.0}}),
    ("negative", "llama-w8a8-kv", "ScaleError", "layers.0.self_attn.k_scale",
     {"fill": {r"layers\.0\.self_attn\.k_scale": -0.5}}),
    ("weight scale", "llama-w8a8-kv", "ScaleError", "layers.0.mlp.up_proj.weight_scale",
     {"fill": {r"layers\.0\.mlp\.up_proj\.weight_scale": float("nan")}}),
    ("heads", "llama-kv-head", "MismatchError", "layers.0.self_attn.k_scale",
     {"shape": {"model.layers.0.self_attn.k_scale": [4, 1, 1]}}),
    ("one head", "llama-kv-head", "MismatchError", "layers.0.self_attn.v_scale",
     {"shape": {"model.layers.0.self_attn.v_scale": [1]}}),
    ("path", "llama", "SourceError", "/nowhere/at/all", {"path": "/nowhere/at/all"}),
    ("truncated", "llama", "SourceError", "Reading the new weights failed", {"path": "truncated"}),
]  # fmt: skip
#: (job, error, what it names)
FAULTS = [
    (case(f"fault {label}", kind, step, GOOD), error, named)
    for label, kind, error, named, step in _FAULTS
]

#: Positions at which the iterator raises: before the first tensor, after the last, and between.
POSITIONS = (0, 1, 5, 14, 20, 21)
RAISES = case("raises", "llama-kv-head", *({"raise_at": number} for number in POSITIONS), GOOD)
#: Ten updates, there and back: packed, quantized, latent attention, experts, LoRA, in tensors.
TEN = [
    case(f"ten {kind} {way}", kind, *({"directory": d} for d in ["new", "old"] * 5), way=way)
    for kind, way in [
        ("llama-kv", PACKED),
        ("llama-w8a8-kv", PACKED),
        ("deepseek-v2", PACKED),
        ("llama-lora", PACKED),
        ("llama-kv", TENSORS),
        ("mixtral", TENSORS),
        ("deepseek-v2", TENSORS),
    ]
]
SCALES_ALONE = case("scales alone", "llama-w8a8-kv", {"only": r"_scale$", "drop": "weight_scale"})
ONE_LAYER = case("one layer", "llama", {"only": r"layers\.1\.mlp\.(gate|up)_proj"}, way=TENSORS)
FROM_PATH = case("from path", "llama-w8a8-kv", {"path": "new"})
FROM_PATH_DUMMY = case(
    "from path dummy", "llama-tied", {"path": "new"}, engine={"load_format": "dummy"}
)
PACKED_COPY = case("packed copy", "llama", {"kernel_format": True, "only": "embed_tokens"})

_OLD = WITH_DIGEST | {"directory": "old"}
SAME = case("same", "llama", _OLD, way=TENSORS, digest=True)
SAME_PACKED = case("same packed", "llama-kv-head", _OLD, digest=True)
SAME_KERNEL_FORMAT = case(
    "same kernel format", "llama", {"kernel_format": True, "only": "norm"}, way=TENSORS
)
ONE_NORM = case(
    "one norm",
    "llama",
    _OLD | {"fill": {"layers.1.input_layernorm": 0.5}},
    {"directory": "old", "options": {"digest": False}},
    way=TENSORS,
    digest=True,
)
ONE_PACKED = case(
    "one packed",
    "llama-kv-head",
    _OLD | {"only": "layers.1.mlp.down_proj", "fill": {"down_proj": 0.25}},
    digest=True,
)
BLIND = [
    case(f"blind {kind}", kind, way=way, blind=True)
    for kind, way in [("llama-kv", TENSORS), ("gpt-oss", TENSORS), ("llama-w8a8-kv", PACKED)]
]

BY_LAYER = case("by layer", "llama", {"raise_at": 12, "atomic": "layer"}, GOOD, way=TENSORS)
NO_ROOM = case(
    "no room",
    "llama",
    {"available": 200_000},  # less than the model, more than a layer
    {"available": 200_000, "atomic": "layer"},
    way=TENSORS,
)

LOST = case(
    "lost",
    "llama-kv",
    {"lose": [], "drop": r"layers\.0\.input_layernorm"},
    {"only": r"_scale$"},
    {"kernel_format": True, "only": "norm"},
    {"raise_at": 9},
    GOOD,
    {"raise_at": 9},
    way=TENSORS,
)
PRESERVED = "model.embed_tokens.weight"
LOST_BUT_ONE = case("lost but one", "llama-kv", {"lose": [PRESERVED], "drop": "embed"}, way=TENSORS)

_RANDOM = {"load_format": "dummy"}
#: Without a checkpoint of its own to compare with, a model is no less strict.
COLLECTS = case("collects", "bert", GOOD, engine=_RANDOM | dict(KINDS["bert"].engine))
RANDOM_FAULTS = case(
    "random",
    "llama",
    {"add": {"model.nowhere.weight": "model.norm.weight"}},
    {"drop": r"layers\.1\.self_attn\.k_proj"},
    GOOD,
    engine=_RANDOM,
)

#: States in which nothing may be read: the iterator raises as soon as it is asked.
REFUSED_STATES = [
    case(f"state {state}", "llama", {"state": state, "raise_at": 0}, GOOD)
    for state in ("eplb", "offloaded", "frozen")
]
NOTHING_TO_OFFLOAD = case("state nothing", "llama", {"state": "nothing to offload"})
HOOK = case("stock hook", "llama-hook", GOOD, way=TENSORS)
COMPUTES = case("stock computes", "llama-computes", GOOD, way=TENSORS)

_HEAD, _EMBED = "lm_head.weight", "model.embed_tokens.weight"
#: A head tied by the configuration; both names sent, equal and not; the head alone.
TIED = case(
    "tied",
    "llama-tied",
    {"add": {_HEAD: _EMBED}, "fill": {_HEAD: 0.5}},
    {"add": {_HEAD: _EMBED}, "only": _HEAD},
    {"add": {_HEAD: _EMBED}},
)
#: A head that upstream ties after loading: both names sent, equal and not; either alone.
RETIED = [
    case(
        f"retied {way}",
        "llama-retied",
        {"fill": {_HEAD: 0.5}},
        {"only": _HEAD},
        GOOD,
        {"directory": "old"},
        {"drop": _HEAD},
        way=way,
    )
    for way in (PACKED, TENSORS)
]
UNTIED = case("untied", "llama-untied", GOOD, {"directory": "old"})
# Updates that come in calls. Memory is reused by the sender unless the fault of stock is another one.
ONE, TWO = {"calls": 1}, {"calls": 2}
REUSED = {"reused": True}
#: In calls of one tensor, then the old weights in calls cut anywhere: between them every kind of layer.
IN_CALLS = [
    case(f"calls {kind} {way}", kind, ONE | REUSED, {"calls": 5, "directory": "old"} | REUSED, way=way)
    for way, kinds in {
        PACKED: ["llama-tied", "llama-hand-set", "llama-kv-head", "llama-w4a16", "llama-lora",
                 "mixtral", "deepseek-v2"],
        TENSORS: ["llama", "llama-kv", "gpt-oss", "bert"],
    }.items()
    for kind in kinds
]  # fmt: skip
UPDATE = case("stock update", "llama", TWO)
UPDATE_PART = case("stock update part", "llama", TWO | {"only": Q0}, TWO, way=TENSORS)
UPDATE_FAILS = case("stock update fails", "llama", TWO | {"raise_at": 9}, TWO)
UPDATE_REUSED = case("stock update reused", "llama", TWO | REUSED, way=TENSORS)
UPDATE_FAULTS = [
    (case(f"update fault {label}", kind, TWO | REUSED | step, TWO | REUSED), error, named)
    for label, kind, error, named, step in _FAULTS
    if "path" not in step
]
UPDATE_SCALES = case(
    "update scales", "llama-w8a8-kv", ONE | REUSED | {"only": r"_scale$", "drop": "weight_scale"}
)
_OPEN = TWO | REUSED | {"phases": ["start", "send"]}
ABANDONED = case("abandoned", "llama", _OPEN | {"only": r"layers\.0"}, TWO | REUSED)
MEANWHILE = case("meanwhile", "llama", _OPEN, GOOD, TWO | {"phases": ["finish"]})
ENDED = case(
    "ended",
    "llama",
    _OPEN | {"again": "model.norm.weight"},
    *(TWO | {"phases": [phase]} for phase in ("send", "finish")),
    TWO,
)
UPDATE_BY_LAYER = case(
    "update by layer", "llama", TWO | {"raise_at": 12, "atomic": "layer"}, TWO, way=TENSORS
)
BY_THEMSELVES = case(
    "by themselves",
    "llama",
    TWO | {"phases": ["start"]},
    TWO | {"phases": ["finish"]},
    engine={"weight_transfer_config": {"backend": "nccl_m2n"}},
)
