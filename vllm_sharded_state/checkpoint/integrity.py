"""Whether a manifest agrees with itself: what no type or pattern can say."""

import math
from typing import TYPE_CHECKING

from .entries import RankEntry

if TYPE_CHECKING:
    from .manifest import Manifest

#: The length field and the shortest header of a safetensors file.
_LEAST_HEADER = 8 + 2
_AGAIN = "@again"
#: Modules are nested no deeper than this many levels.
_DEEPEST = 64


def violation(manifest: "Manifest") -> str | None:
    """The first contradiction in `manifest`, in words, or None. Linear in its size."""
    ranks = [entry.rank for entry in manifest.ranks]
    if ranks != list(range(len(ranks))):
        return f"its ranks are {ranks[:8]}, not 0, 1, 2, … in order"
    world = manifest.binding.get("world", {})
    sizes = [world.get(f"{kind}_parallel_size", 1) for kind in ("tensor", "pipeline")]
    if not all(type(size) is int and size > 0 for size in sizes):
        return f"its tensor and pipeline parallel sizes are {sizes}"
    count = math.prod(size for size in sizes if isinstance(size, int))
    if count != len(ranks):
        return f"it lists {len(ranks)} ranks, and its parallel sizes make {count}"
    owner: dict[str, int] = {}
    for entry in manifest.ranks:
        for name in entry.files:
            if owner.setdefault(name, entry.rank) != entry.rank:
                return f"{name} is listed by rank {owner[name]} and by rank {entry.rank}"
        wrong = _rank(entry)
        if wrong is not None:
            return f"rank {entry.rank}: {wrong}"
    return None


def _rank(entry: RankEntry) -> str | None:
    inside = _Covered(entry)
    paths: set[tuple[str, str]] = set()
    keys: set[tuple[str, str]] = set()
    filled = dict.fromkeys(entry.files, 0)
    for name, tensor in entry.tensors.items():
        path = name.removesuffix(_AGAIN)
        if tensor.file not in filled:
            return f"tensor {name} lies in {tensor.file!r}, which is not listed"
        if (tensor.file, tensor.key) in keys:
            return f"key {tensor.key} of {tensor.file} is listed twice"
        keys.add((tensor.file, tensor.key))
        for taken in (path, *tensor.aliases):
            if (tensor.stage, taken) in paths:
                return f"{taken} is listed twice in stage {tensor.stage}"
            paths.add((tensor.stage, taken))
            if not inside.covers(taken):
                return f"{taken} lies in no unit that is listed"
        if tensor.owner is not None and not _below(tensor.owner, path):
            return f"{name} is said to be an attribute of {tensor.owner!r}, where it can't lie"
        if tensor.stride is not None and len(tensor.stride) != len(tensor.shape):
            return f"{name} has {len(tensor.shape)} dimensions and {len(tensor.stride)} strides"
        filled[tensor.file] += tensor.nbytes
    for file, content in filled.items():
        if content + _LEAST_HEADER > entry.files[file].size:
            return f"{file} has {entry.files[file].size} bytes, and its tensors take {content}"
    for name, value in entry.values.items():
        path = name.removesuffix(_AGAIN)
        if not inside.covers(path):
            return f"value {name} lies in no unit that is listed"
        if value.owner is not None and not _below(value.owner, path):
            return f"{name} is said to be an attribute of {value.owner!r}, where it can't lie"
    for name in entry.kernels:
        if not inside.covers_module(name):
            return f"kernel of {name}, which lies in no unit that is listed"
    return None


class _Covered:
    """Whether a path lies in a listed unit, remembered by module."""

    def __init__(self, entry: RankEntry) -> None:
        self._known = dict.fromkeys(entry.units, True)

    def covers(self, path: str) -> bool:
        return self.covers_module(path.rpartition(".")[0])

    def covers_module(self, name: str) -> bool:
        if name.count(".") > _DEEPEST:  # Else a hostile name takes time that grows with its square.
            return False
        asked = []
        while name and name not in self._known:
            asked.append(name)
            name = name.rpartition(".")[0]
        answer = self._known.get(name, False)
        self._known.update(dict.fromkeys(asked, answer))
        return answer


def _below(owner: str, path: str) -> bool:
    return not owner or path.startswith(owner + ".")
