"""Manifests that are well formed, with checksums that fit, and say what no save would have said.

Who can write checksums can write any checkpoint: two norms of one shape exchanged make a valid one, and
nothing can tell it from the one that was saved (`test_line.py` shows where that line is). What is
refused here contradicts itself, the model, or what its modules were seen to compute.
"""

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch

from tests.hostile import spoil
from tests.hostile.corpus import Case
from tests.support import edit

RankEdit = Callable[[spoil.Data], Any]

DOWN0, DOWN1 = (f"model.layers.{n}.mlp.down_proj.weight" for n in (0, 1))
NORM0, NORM1 = (f"model.layers.{n}.input_layernorm.weight" for n in (0, 1))
ATTN = "model.layers.1.self_attn.attn"
FLOAT, CPU, SCALE = f"{ATTN}._k_scale_float", f"{ATTN}._k_scale_cpu", f"{ATTN}._k_scale"
#: Where the bytes of a tensor are.
PLACE = ("file", "key", "checksum")


def _rank(edit: RankEdit) -> Callable[[Path], None]:
    return lambda directory: spoil.edit_manifest(directory, lambda m: _void(edit(m["ranks"][0])))


def _whole(edit: RankEdit) -> Callable[[Path], None]:
    return lambda directory: spoil.edit_manifest(directory, lambda m: _void(edit(m)))


def _void(_: object) -> None:
    """An edit is often an expression."""


def exchange(a: str, b: str) -> RankEdit:
    """The bytes of two tensors of one form, exchanged."""

    def change(rank: spoil.Data) -> None:
        first, second = rank["tensors"][a], rank["tensors"][b]
        for name in PLACE:
            first[name], second[name] = second[name], first[name]

    return change


def _same_place(a: str, b: str) -> RankEdit:
    return lambda rank: rank["tensors"][b].update({n: rank["tensors"][a][n] for n in PLACE})


def _field(path: str, name: str, value: Any) -> RankEdit:
    return lambda rank: rank["tensors"][path].__setitem__(name, value)


def _value(path: str, name: str, value: Any) -> RankEdit:
    return lambda rank: rank["values"][path].__setitem__(name, value)


def _more_value(path: str, value: Any, owner: str | None) -> RankEdit:
    entry = {"value": value, "stage": "runtime"} | ({} if owner is None else {"owner": owner})
    return lambda rank: rank["values"].__setitem__(path, entry)


def _moved(path: str, to: str, **more: Any) -> RankEdit:
    """The entry of a tensor, under another path."""

    def change(rank: spoil.Data) -> None:
        rank["tensors"][to] = rank["tensors"].pop(path) | more

    return change


def _extra(path: str, owner: str) -> Callable[[Path], None]:
    """One tensor more in the hidden part, for an attribute that no load creates."""

    def change(directory: Path) -> None:
        hidden = spoil.hidden_part(directory)
        edit.rewrite(hidden, lambda tensors: tensors.__setitem__(path, torch.tensor(0.5)))
        edit.list_again(directory, hidden)
        more = {"kind": "attribute", "owner": owner}
        spoil.edit_manifest(directory, lambda m: m["ranks"][0]["tensors"][path].update(more))

    return change


def _unit(name: str, field: str, value: Any) -> RankEdit:
    return lambda rank: rank["units"][name].__setitem__(field, value)


def _all_kernels(value: str) -> RankEdit:
    return lambda rank: rank["kernels"].update(dict.fromkeys(rank["kernels"], value))


def _deep(levels: int) -> Any:
    value: Any = {"frozenset": []}
    for _ in range(levels):
        value = {"frozenset": [value]}
    return value


#: For directories with a module that has both a tensor and its mirrors, in runtime layout.
RUNTIME: dict[str, tuple[Callable[[Path], None], tuple[str, ...]]] = {
    "two linear weights exchanged": (_rank(exchange(DOWN0, DOWN1)), ("mlp.down_proj",)),
    "an embedding for the head": (
        _rank(exchange("model.embed_tokens.weight", "lm_head.weight")),
        ("lm_head",),
    ),
    "one place for two tensors": (_rank(_same_place(NORM0, NORM1)), (NORM0,)),
    "one place for two linear weights": (_rank(_same_place(DOWN0, DOWN1)), (DOWN0,)),
    "a float mirror of another scale": (
        _rank(_value(FLOAT, "value", {"float": "0x1p-3"})),
        ("_k_scale_float",),
    ),
    "a float mirror that is NaN": (
        _rank(_value(FLOAT, "value", {"float": "nan"})),
        ("_k_scale_float",),
    ),
    "a float mirror that is text": (_rank(_value(FLOAT, "value", "0.5")), ("_k_scale_float",)),
    "a float mirror that is an integer": (_rank(_value(FLOAT, "value", 1)), ("_k_scale_float",)),
    "a float mirror that is a set": (
        _rank(_value(FLOAT, "value", {"set": []})),
        ("_k_scale_float",),
    ),
    "a float that is out of range": (
        _rank(_value(FLOAT, "value", {"float": "0x1p99999"})),
        ("_k_scale_float",),
    ),
    "a float that is a word": (_rank(_value(FLOAT, "value", {"float": "x"})), ("_k_scale_float",)),
    "a float that is a list": (_rank(_value(FLOAT, "value", {"float": []})), ("_k_scale_float",)),
    "a value with two tags": (
        _rank(_value(FLOAT, "value", {"float": "0x1p0", "set": []})),
        ("_k_scale_float",),
    ),
    "a set of sets": (
        _rank(_value(FLOAT, "value", {"set": [{"set": []}]})),
        ("_k_scale_float",),
    ),
    "a set 300 levels deep": (_rank(_value(FLOAT, "value", _deep(300))), ("_k_scale_float",)),
    "a host copy of a scale exchanged": (
        _rank(exchange(CPU, CPU.replace("layers.1", "layers.0"))),
        ("_k_scale_cpu",),
    ),
    "a scale exchanged, its mirrors not": (
        _rank(exchange(SCALE, SCALE.replace("_k_", "_v_"))),
        ("_scale",),
    ),
    "a value without a place": (
        _rank(_more_value("model.norm.stranger.x", 1, None)),
        ("stranger",),
    ),
    "a value for no module": (_rank(_more_value("model.x.y", 1, "model.x")), ("model.x",)),
    "a value of another owner": (
        _rank(_more_value(f"{ATTN}.stranger", 1, "model.norm")),
        ("stranger",),
    ),
    "a value for a method": (
        _rank(_more_value("model.norm.forward", "x", "model.norm")),
        ("forward",),
    ),
    "a value for a tensor": (_rank(_more_value("model.norm.weight", 1, "model.norm")), ("weight",)),
    "a value for a module": (_rank(_more_value("model.norm", 1, "model")), ("model.norm",)),
    "a value for a class": (
        _rank(_more_value("model.norm.__class__", "x", "model.norm")),
        ("__class__",),
    ),
    "a value for torch's books": (
        _rank(_more_value("model.norm._parameters", None, "model.norm")),
        ("_parameters",),
    ),
    "a tensor for no module": (
        _extra("model.x.y", "model.x"),
        ("model.x",),
    ),
    "a tensor of another owner": (
        _extra(f"{ATTN}.stranger", "model.norm"),
        ("stranger",),
    ),
    "a tensor for a method": (
        _extra("model.norm.forward", "model.norm"),
        ("forward",),
    ),
    "a tensor for a number": (
        _extra("model.norm.variance_epsilon", "model.norm"),
        ("variance_epsilon",),
    ),
    "a tensor for a module": (_extra("model.norm", "model"), ("model.norm",)),
    "a parameter that replaces another": (_rank(_field(NORM0, "replace", True)), (NORM0,)),
    "all kernels of another result": (_rank(_all_kernels("0" * 32)), ("down_proj",)),
    "kernels of a stranger": (
        _rank(lambda rank: rank["kernels"].update({"model.stranger": "0" * 32})),
        ("model.stranger",),
    ),
}
BOTH: dict[str, tuple[RankEdit, tuple[str, ...]]] = {
    "an alias that is a tensor of its own": (_field(NORM0, "aliases", [NORM1]), (NORM1,)),
    "an alias without a place": (_field(NORM0, "aliases", ["model.x.weight"]), ("model.x.weight",)),
    "an alias twice": (_field(NORM0, "aliases", [NORM0]), (NORM0,)),
    "a norm's tensor gone from the manifest": (lambda rank: rank["tensors"].pop(NORM0), (NORM0,)),
    "a norm as its neighbour's alias": (
        lambda rank: (rank["tensors"].pop(NORM0), _field(NORM1, "aliases", [NORM0])(rank)),
        (NORM0,),
    ),
    "a tensor under another path": (_moved(NORM0, "model.x.weight"), ("model.x.weight",)),
    "a tensor of an unknown stage": (_field(NORM0, "stage", "later"), ("stage",)),
    "a tensor of an unknown kind": (_field(NORM0, "kind", "weight"), ("kind",)),
    "a tensor of another shape": (_field(NORM0, "shape", [64, 2]), (NORM0,)),
    "a tensor of another dtype": (_field(NORM0, "dtype", "F16"), (NORM0,)),
    "a tensor of another checksum": (_field(NORM0, "checksum", "0" * 32), (NORM0,)),
    "a tensor in another file": (
        _field(NORM0, "file", "hidden-state-rank-0-part-0.safetensors"),
        (NORM0,),
    ),
    "a tensor in no file": (_field(NORM0, "file", "elsewhere.safetensors"), (NORM0,)),
    "a tensor under no key": (_field(NORM0, "key", "elsewhere"), (NORM0,)),
    "a unit by another method": (_unit("lm_head", "method", "torch.nn.Identity"), ("lm_head",)),
    "a unit in no layout": (_unit("lm_head", "layout", "both"), ("layout",)),
    "a unit gone": (lambda rank: rank["units"].pop("lm_head"), ("lm_head",)),
    "a unit more": (
        lambda rank: rank["units"].update({"model.x": rank["units"]["lm_head"]}),
        ("model.x",),
    ),
    "rank 1": (lambda rank: rank.update(rank=1), ("rank",)),
    "rank 2**70": (lambda rank: rank.update(rank=2**70), ("rank",)),
}
WHOLE: dict[str, tuple[RankEdit, tuple[str, ...]]] = {
    "no ranks": (lambda m: m.update(ranks=[]), ("rank",)),
    "its rank twice": (lambda m: m["ranks"].append(m["ranks"][0]), ("rank",)),
    "a rank more": (lambda m: m["ranks"].append(m["ranks"][0] | {"rank": 1}), ("rank",)),
    "another world": (
        lambda m: m["binding"]["world"].update(tensor_parallel_size=2),
        ("parallel", "2", "1"),
    ),
    "a world of another kind": (
        lambda m: m["binding"]["world"].update(stranger=2),
        ("world.stranger",),
    ),
    "another activation": (
        lambda m: m["binding"]["model"].update({"config.hidden_act": "gelu"}),
        ("config.hidden_act", "gelu", "silu"),
    ),
    "another model dtype": (
        lambda m: m["binding"]["model"].update(dtype="float16"),
        ("model.dtype",),
    ),
    "a field of the config gone": (
        lambda m: m["binding"]["model"].pop("config.rms_norm_eps"),
        ("config.rms_norm_eps",),
    ),
    "a newer format": (lambda m: m.update(version=m["version"] + 1), ("version",)),
    "a version that is a float": (lambda m: m.update(version=float(m["version"])), ("version",)),
    "another format": (lambda m: m.update(format="safetensors"), ("format",)),
}


def cases() -> Iterator[Case]:
    for base in ("runtime", "fp8", "tied", "auto", "source"):
        if base != "source":
            for name, (spoilt, said) in RUNTIME.items():
                if base == "tied" and (
                    "head" in name or "scale" in name or "_k_scale_float" in said
                ):
                    continue  # It has one embedding, and scales that are all 1.
                if base == "auto" and ("linear" in name or "head" in name):
                    continue  # Its weights are in source layout.
                yield Case(f"{base}: {name}", base, spoilt, said)
        for name, (change, said) in BOTH.items():
            if base == "tied" and "unit" in name:
                continue
            yield Case(f"{base}: {name}", base, _rank(change), said)
        for name, (change, said) in WHOLE.items():
            yield Case(f"{base}: {name}", base, _whole(change), said)
