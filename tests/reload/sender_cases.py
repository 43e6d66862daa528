"""Jobs in which it matters how tensors are sent, and where they lie."""

from typing import Any

from tests.reload.cases import DEFAULTS, GOOD, MIXTURE, TWO, case
from tests.zoo.kinds import PACKED, TENSORS

_UP_SCALE = "model.layers.0.mlp.up_proj.weight_scale"

#: How tensors are sent, in one call of `reload_weights` and in an update: error, and what it names.
_SENDERS: list[tuple[str, str, str, dict[str, Any]]] = [
    ("one_buffer", "SourceError", "came in the memory that", {}),
    ("live_views", "SourceError", "lies in the running model's own memory", {}),
    ("same_memory", "UnexpectedError", "model.nowhere.weight", {}),
    ("no_tensor", "SourceError", "a pair of str and NoneType", {}),
    ("meta", "SourceError", "model.norm.weight is on the meta device", {}),
    ("sparse", "SourceError", "model.norm.weight has layout torch.sparse_coo", {}),
    (
        "starts",
        "SourceError",
        "can't be started, continued or finished from in there",
        {"calls": 0},
    ),
    (
        "finishes",
        "SourceError",
        "can't be started, continued or finished from in there",
        {"calls": 0},
    ),
]
SENDERS = [
    (
        case(f"sender {name}{label}", "llama", {"sender": name} | how | more, GOOD | how),
        error,
        named,
    )
    for name, error, named, more in _SENDERS
    for label, how in {"": {}, " in one call": {"calls": 0}}.items()
    if label or not more
]
BUFFERS = [
    case(f"layer buffers {way}", "llama", {"sender": "layer_buffers"}, way=way)
    for way in (PACKED, TENSORS)
]
HUGE = case(
    "huge scale",
    "llama-w8a8-kv",
    {"dtype": {_UP_SCALE: "float64"}, "fill": {r"layers\.0\.mlp\.up_proj\.weight_scale": 1e300}},
    GOOD,
)
#: Kernel format: a host mirror by itself; two contents for one tensor, by its second name too.
MIRROR = case("kernel format mirror", "llama-kv", {"kernel_format": True, "sender": "host_mirror"})
TWO_CONTENTS = case(
    "kernel format tied",
    "llama-tied",
    {"kernel_format": True, "fill": {"lm_head.weight": 0.5}},
    {"kernel_format": True, "fill": {"lm_head|embed_tokens": 0.5}, "only": "lm_head|embed_tokens"},
    way=TENSORS,
)
SECOND_NAMES = case(
    "kernel format second names", "llama-lora", {"kernel_format": True}, way=TENSORS
)
#: Both names of a tied tensor, in calls of one tensor.
TIED_IN_CALLS = case(
    "tied in calls",
    "llama-tied",
    {"calls": 1, "reused": True, "add": {"lm_head.weight": "model.embed_tokens.weight"}},
)
SAVED_MEANWHILE = case(
    "saved meanwhile",
    "llama",
    TWO | {"phases": ["start", "send"], "save": MIXTURE},
    TWO | {"phases": ["finish"]},
)
#: Saved with the scales that the constructor gives; changed by hand; then back.
DEFAULT_SCALES = [
    case(
        f"default scales {way}",
        "llama-hand-set",
        {"mutate": "set_scales", "path": DEFAULTS},
        way=way,
        mutate=None,
        save=DEFAULTS,
    )
    for way in (PACKED, TENSORS)
]
