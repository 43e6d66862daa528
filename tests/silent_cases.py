"""Saved directories that were changed from outside, and what the load has to say to each.

A case edits a copy of a saved directory. Those with `listed` also bring the manifest up to date, so
that only a comparison with the model can find them.
"""

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file

from tests.support import edit

#: A weight, and a KV scale that every layout holds under some key.
WEIGHT = "model.layers.1.self_attn.o_proj.weight"
#: What has to be said where a file alone was changed, and the manifest still tells how it was.
PART = ("model-rank-0-part-",)
STRANGER = "model.layers.1.self_attn.stranger.weight"


@dataclass(frozen=True)
class Case:
    """`change` spoils a directory; loading it with `engine` arguments must raise and say `words`."""

    change: Callable[[Path], None]
    words: tuple[str, ...]
    engine: Mapping[str, Any] = field(default_factory=dict)
    #: Also refused with `strict=false`, which forgives missing tensors and nothing else.
    forgiven: bool = False


def scale_key(directory: Path) -> str:
    """The key of layer 1's key scale: the parameter where the layout has it, else the buffer."""
    keys = [key for path in directory.glob("*.safetensors") for key in load_file(path)]
    for name in ("k_scale", "_k_scale"):
        if (key := f"model.layers.1.self_attn.attn.{name}") in keys:
            return key
    raise KeyError("k_scale of layer 1")


def _edit(directory: Path, key: str, change: Callable[[edit.Tensors], None], listed: bool) -> None:
    path = edit.find(directory, key)
    edit.rewrite(path, change)
    if listed:
        edit.list_again(directory, path)


def _drop(listed: bool, find: Callable[[Path], str] = lambda _: WEIGHT) -> Callable[[Path], None]:
    def change(directory: Path) -> None:
        key = find(directory)

        def drop(tensors: edit.Tensors) -> None:
            del tensors[key]

        _edit(directory, key, drop, listed)

    return change


def _add(listed: bool) -> Callable[[Path], None]:
    def change(directory: Path) -> None:
        def add(tensors: edit.Tensors) -> None:
            tensors[STRANGER] = torch.ones(4, 4, dtype=torch.bfloat16)

        _edit(directory, WEIGHT, add, listed)

    return change


def _become(listed: bool, make: Callable[[torch.Tensor], torch.Tensor]) -> Callable[[Path], None]:
    def change(directory: Path) -> None:
        def replace(tensors: edit.Tensors) -> None:
            tensors[WEIGHT] = make(tensors[WEIGHT]).contiguous()

        _edit(directory, WEIGHT, replace, listed)

    return change


def _config(name: str, value: Any) -> Callable[[Path], None]:
    def change(directory: Path) -> None:
        path = directory / "config.json"
        config = json.loads(path.read_text()) | {name: value}
        path.unlink()
        path.write_text(json.dumps(config))

    return change


def _lose_part(directory: Path) -> None:
    edit.parts(directory)[1].unlink()


def _truncate_part(directory: Path) -> None:
    path = edit.parts(directory)[1]
    data = path.read_bytes()
    path.unlink()
    path.write_bytes(data[: len(data) // 2])


def _flip_byte(directory: Path) -> None:
    path = edit.find(directory, WEIGHT)
    data = bytearray(path.read_bytes())
    data[-7] ^= 1
    path.unlink()
    path.write_bytes(data)


def _older_parts(directory: Path) -> None:
    """A part that an earlier, larger save left behind."""
    last = edit.parts(directory)[-1]
    (directory / f"model-rank-0-part-{len(edit.parts(directory))}.safetensors").hardlink_to(last)


def _cut_manifest(directory: Path) -> None:
    path = directory / edit.MANIFEST
    text = path.read_text()
    path.unlink()
    path.write_text(text[: len(text) // 2])


def _escape(directory: Path) -> None:
    manifest = edit.read_manifest(directory)
    files = manifest["ranks"][0]["files"]
    files["../elsewhere.safetensors"] = next(iter(files.values()))
    edit.write_manifest(directory, manifest)


def _nothing(directory: Path) -> None:
    assert (directory / edit.MANIFEST).exists()


def _transposed(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.reshape(-1, tensor.shape[0] * 2)


CASES: dict[str, Case] = {
    "a tensor is gone from its part": Case(_drop(False), PART),
    "a tensor is gone, unlisted": Case(_drop(True), (WEIGHT,), forgiven=True),
    "a scale is gone, unlisted": Case(_drop(True, scale_key), ("k_scale",), forgiven=True),
    "a tensor without a place": Case(_add(False), PART),
    "a tensor without a place, listed": Case(_add(True), (STRANGER,)),
    "wrong shape": Case(_become(False, _transposed), PART),
    "wrong shape, listed": Case(_become(True, _transposed), (WEIGHT,)),
    "a row too few, listed": Case(_become(True, lambda t: t[:-1]), (WEIGHT,)),
    "a row too many, listed": Case(_become(True, lambda t: torch.cat([t, t[:1]])), (WEIGHT,)),
    "wrong dtype": Case(_become(False, torch.Tensor.half), PART),
    "wrong dtype, listed": Case(_become(True, torch.Tensor.half), (WEIGHT,)),
    "another rms_norm_eps": Case(_config("rms_norm_eps", 1e-5), ("rms_norm_eps",)),
    "another rope_theta": Case(_config("rope_theta", 5000.0), ("rope_theta",)),
    "another number of heads of one size": Case(
        _config("num_attention_heads", 2), ("num_attention_heads",)
    ),
    "another activation, by override": Case(
        _nothing, ("hidden_act",), {"hf_overrides": {"hidden_act": "gelu"}}
    ),
    "another rank count": Case(
        _nothing, ("tensor_parallel_size", "1", "2"), {"tensor_parallel_size": 2}
    ),
    "another KV-cache dtype": Case(
        _nothing, ("kv_cache_dtype", "fp8", "fp8_e5m2"), {"kv_cache_dtype": "fp8_e5m2"}
    ),
    "a part is missing": Case(_lose_part, ("model-rank-0-part-1.safetensors",)),
    "a part is cut short": Case(_truncate_part, ("model-rank-0-part-1.safetensors",)),
    "a part has a flipped bit": Case(_flip_byte, ("model-rank-0-part-",)),
    "an older set of parts": Case(_older_parts, ("model-rank-0-part-",)),
    "the manifest is cut short": Case(_cut_manifest, (edit.MANIFEST,)),
    "a file name leads out of the directory": Case(_escape, (edit.MANIFEST, "elsewhere")),
    "unknown options": Case(
        _nothing,
        ("['nonsense', 'other']",),
        {"model_loader_extra_config": {"other": 1, "nonsense": 2}},
    ),
}
