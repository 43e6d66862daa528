"""Change a saved directory from outside: with the safetensors library and json, nothing of ours.

What is relied on: parts are `model-rank-0-part-*.safetensors`, and `sharded_state.json` has under
`ranks[0]` `files` with `size` and `header` and, by path, `tensors` with `file`, `key`, `shape`, `dtype`
and `checksum` (XXH3, 128 bits, as the manifest's own `checksum`, of its JSON without white space).
"""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from xxhash import xxh3_128

MANIFEST = "sharded_state.json"
NAMES = {torch.bfloat16: "BF16", torch.float32: "F32", torch.float16: "F16", torch.int8: "I8"}

Tensors = dict[str, torch.Tensor]


def parts(directory: Path) -> list[Path]:
    """The part files of rank 0, in order of their number."""
    found = directory.glob("model-rank-0-part-*.safetensors")
    return sorted(found, key=lambda path: int(path.stem.rsplit("-", 1)[1]))


def find(directory: Path, key: str) -> Path:
    """The file that holds `key`, a part or one of hidden state."""
    for path in sorted(directory.glob("*.safetensors")):
        if key in load_file(path):
            return path
    raise KeyError(key)


def rewrite(path: Path, change: Callable[[Tensors], None]) -> None:
    """Let `change` edit the tensors of a file, and write them back."""
    tensors = load_file(path)
    change(tensors)
    path.unlink()  # It may be a link to the original's.
    save_file(tensors, path, metadata={"format": "pt"})


def read_manifest(directory: Path) -> dict[str, Any]:
    manifest: dict[str, Any] = json.loads((directory / MANIFEST).read_text())
    return manifest


def write_manifest(directory: Path, manifest: dict[str, Any]) -> None:
    """Write it with a checksum that fits: nothing shows that it was edited."""
    rest = {name: value for name, value in manifest.items() if name != "checksum"}
    text = json.dumps(rest, sort_keys=True, separators=(",", ":"))
    manifest["checksum"] = _hash(text.encode())
    path = directory / MANIFEST
    path.unlink()
    path.write_text(json.dumps(manifest))


def _hash(data: bytes) -> str:
    return str(xxh3_128(data).hexdigest())


def _checksum(tensor: torch.Tensor) -> str:
    return _hash(tensor.contiguous().reshape(-1).view(torch.uint8).numpy().tobytes())


def list_again(directory: Path, path: Path) -> None:
    """Make the manifest agree with `path` as it is now: its size, and every tensor's form.

    Tensors that are gone lose their entry and new ones get one, so that only the model itself can
    tell that something is wrong.
    """
    manifest = read_manifest(directory)
    rank = manifest["ranks"][0]
    data = path.read_bytes()
    header = data[: 8 + int.from_bytes(data[:8], "little")]
    rank["files"][path.name] = {"size": len(data), "header": _hash(header)}
    tensors = load_file(path)
    for name, entry in list(rank["tensors"].items()):
        if entry["file"] != path.name:
            continue
        tensor = tensors.pop(entry["key"], None)
        if tensor is None:
            del rank["tensors"][name]
        else:
            entry |= {
                "shape": list(tensor.shape),
                "dtype": NAMES[tensor.dtype],
                "checksum": _checksum(tensor),
            }
    for key, tensor in tensors.items():
        rank["tensors"][key] = {
            "file": path.name,
            "key": key,
            "kind": "parameter",
            "dtype": NAMES[tensor.dtype],
            "shape": list(tensor.shape),
            "stage": "runtime",
            "checksum": _checksum(tensor),
            "aliases": [],
            "owner": None,
        }
    write_manifest(directory, manifest)


def copy(directory: Path, to: Path) -> Path:
    """A copy whose files are links to the originals; `rewrite` and `write_manifest` break the link."""
    to.mkdir(parents=True)
    for path in directory.iterdir():
        (to / path.name).hardlink_to(path)
    return to
