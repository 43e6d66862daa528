"""What is done to a copy of a sharded state before it is reloaded, by name; most make checksums fit."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

from tests.support import edit

ATTENTION = "model.layers.1.self_attn.attn"
DOWN = "model.layers.1.mlp.down_proj.weight"


def flip(directory: Path, rank: int = 0) -> None:
    """One bit of a weight of the last layer; the header stays as it was written."""
    entry = edit.read_manifest(directory)["ranks"][rank]["tensors"][DOWN]
    path = directory / entry["file"]
    data = bytearray(path.read_bytes())
    start = 8 + int.from_bytes(data[:8], "little")
    data[start + json.loads(data[8:start])[entry["key"]]["data_offsets"][0]] ^= 1
    path.unlink()  # It is a link to the original's.
    path.write_bytes(data)


def truncate(directory: Path) -> None:
    path = edit.parts(directory)[-1]
    data = path.read_bytes()
    path.unlink()
    path.write_bytes(data[:-1000])


def without_a_norm(directory: Path) -> None:
    path = edit.find(directory, "model.layers.1.input_layernorm.weight")
    edit.rewrite(path, lambda tensors: _void(tensors.pop("model.layers.1.input_layernorm.weight")))
    edit.list_again(directory, path)


def without_manifest(directory: Path) -> None:
    (directory / edit.MANIFEST).unlink()


def of_two_ranks(directory: Path) -> None:
    def change(manifest: dict[str, Any]) -> None:
        manifest["binding"]["world"]["tensor_parallel_size"] = 2
        manifest["ranks"].append({"rank": 1})

    _manifest(directory, change)


def untied(directory: Path) -> None:
    _manifest(directory, lambda m: m.update(tied_word_embeddings=not m["tied_word_embeddings"]))


def other_results(directory: Path) -> None:
    """What modules computed when they were saved was something else."""

    def change(manifest: dict[str, Any]) -> None:
        kernels = manifest["ranks"][0]["kernels"]
        kernels.update({name: checksum[::-1] for name, checksum in kernels.items()})

    _manifest(directory, change)


def nan_scale(directory: Path) -> None:
    """A KV scale of the last layer is NaN, and whatever repeats it says the same."""
    paths = {f"{ATTENTION}._k_scale", f"{ATTENTION}._k_scale_cpu", f"{ATTENTION}.k_scale"}
    for path in sorted(directory.glob("*.safetensors")):
        edit.rewrite(path, lambda tensors: _fill(tensors, paths))
        edit.list_again(directory, path)
    name = f"{ATTENTION}._k_scale_float"

    def change(manifest: dict[str, Any]) -> None:
        values = manifest["ranks"][0].get("values", {})
        if name in values:
            values[name]["value"] = {"float": "nan"}

    _manifest(directory, change)


def _fill(tensors: edit.Tensors, paths: set[str]) -> None:
    for path in paths & tensors.keys():
        tensors[path].fill_(float("nan"))


def _manifest(directory: Path, change: Callable[[dict[str, Any]], Any]) -> None:
    manifest = edit.read_manifest(directory)
    change(manifest)
    edit.write_manifest(directory, manifest)


def _void(_: object) -> None:
    """An edit is often an expression."""


SPOILS: dict[str, Callable[[Path], None]] = {
    change.__name__: change
    for change in (
        flip,
        truncate,
        without_a_norm,
        without_manifest,
        of_two_ranks,
        untied,
        other_results,
        nan_scale,
    )
}
