"""The checkpoints that are read: made once under `.cache/bench`, and described in `input.json`.

`llama`: 2 GB of ordinary tensors, bf16, in the shapes of a Llama of 1.2 billion parameters as vLLM
holds it (fused projections). `tiny-10000`, `tiny-50000`: so many tensors of 256 bytes. The bytes are
random, the files are what this package's writer makes, and every contender reads the same ones.
"""

import hashlib
import json
import os
import shutil
import zlib
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch

from vllm_sharded_state.checkpoint import checksum, writing

DESCRIPTION = "input.json"
DTYPES = {"BF16": torch.bfloat16, "F32": torch.float32}

Form = tuple[str, tuple[int, ...]]


@dataclass(frozen=True)
class Stored:
    """Where a tensor lies: `size` bytes at `offset` (from the start of `file`); and its checksum."""

    file: str
    offset: int
    size: int
    dtype: str
    shape: tuple[int, ...]
    checksum: str

    @property
    def count(self) -> int:
        """The number of elements."""
        return self.size // DTYPES[self.dtype].itemsize


@dataclass(frozen=True)
class Input:
    """A checkpoint: its files with their sizes and the checksums of their headers, and its tensors."""

    name: str
    directory: Path
    files: dict[str, tuple[int, str]]
    tensors: dict[str, Stored]

    @property
    def paths(self) -> list[Path]:
        """The files."""
        return [self.directory / name for name in self.files]

    @property
    def bytes(self) -> int:
        """The bytes of all tensors."""
        return sum(tensor.size for tensor in self.tensors.values())


def llama(scale: int = 1) -> Iterator[tuple[str, tuple[int, ...]]]:
    """Keys and shapes of the large model; `scale` divides every width."""
    hidden, wide, kv, words = 2048 // scale, 8192 // scale, 512 // scale, 32000 // scale
    yield "model.embed_tokens.weight", (words, hidden)
    for layer in range(16):
        prefix = f"model.layers.{layer}"
        yield f"{prefix}.input_layernorm.weight", (hidden,)
        yield f"{prefix}.self_attn.qkv_proj.weight", (hidden + 2 * kv, hidden)
        yield f"{prefix}.self_attn.o_proj.weight", (hidden, hidden)
        yield f"{prefix}.post_attention_layernorm.weight", (hidden,)
        yield f"{prefix}.mlp.gate_up_proj.weight", (2 * wide, hidden)
        yield f"{prefix}.mlp.down_proj.weight", (hidden, wide)
    yield "model.norm.weight", (hidden,)


def tiny(count: int) -> Iterator[tuple[str, tuple[int, ...]]]:
    """Keys and shapes of `count` tensors of 256 bytes, named as experts' scales are."""
    for index in range(count):
        layer, expert = divmod(index, 256)
        yield f"model.layers.{layer}.mlp.experts.{expert}.down_proj.weight_scale", (16, 8)


def noise(key: str, shape: tuple[int, ...]) -> torch.Tensor:
    """Random bf16 bytes that depend on `key` only; NaN among them."""
    generator = torch.Generator().manual_seed(zlib.crc32(key.encode()))
    size = torch.Size(shape).numel() * 2
    words = torch.empty(-(-size // 8), dtype=torch.int64)
    words.random_(generator=generator)
    return words.view(torch.uint8)[:size].view(torch.bfloat16).view(shape)


def ensure(name: str, root: Path) -> Input:
    """The input `name`, made in `root` where it is missing or the writer has changed since."""
    directory = root / name
    recipe = hashlib.sha256()
    for file in (__file__, writing.__file__, checksum.__file__):
        recipe.update(Path(file).read_bytes())
    if (directory / DESCRIPTION).exists():
        found = json.loads((directory / DESCRIPTION).read_text())
        if found["recipe"] == recipe.hexdigest():
            return read(directory)
    shutil.rmtree(directory, ignore_errors=True)
    directory.mkdir(parents=True)
    given = _write(name, directory, dict(_shapes(name)))
    description = {**asdict(given), "recipe": recipe.hexdigest()}
    del description["directory"]
    (directory / DESCRIPTION).write_text(json.dumps(description))
    return given


def read(directory: Path) -> Input:
    """The input that lies in `directory`."""
    found = json.loads((directory / DESCRIPTION).read_text())
    files = {name: (size, header) for name, (size, header) in found["files"].items()}
    tensors = {
        key: Stored(**{**form, "shape": tuple(form["shape"])})
        for key, form in found["tensors"].items()
    }
    return Input(found["name"], directory, files, tensors)


def _shapes(name: str) -> Iterator[tuple[str, tuple[int, ...]]]:
    kind, _, number = name.partition("-")
    if kind == "llama":
        return llama(int(number or 1))
    if kind == "tiny":
        return tiny(int(number))
    raise ValueError(f"no input is named {name!r}: llama[-SCALE], tiny-COUNT")


def _write(name: str, directory: Path, shapes: dict[str, tuple[int, ...]]) -> Input:
    from .contenders.ours import write

    written = write(directory, shapes, lambda key: noise(key, shapes[key]), sync=True)
    files, tensors = {}, {}
    for file in sorted({file for file, _ in written.values()}):
        path = directory / file
        with open(path, "rb") as stream:
            head = stream.read(8)
            head += stream.read(int.from_bytes(head, "little"))
        files[file] = (os.path.getsize(path), checksum.checksum(head))
        header: dict[str, Any] = json.loads(head[8:])
        for key, form in header.items():
            if key == "__metadata__":
                continue
            begin, end = form["data_offsets"]
            tensors[key] = Stored(
                file,
                len(head) + begin,
                end - begin,
                form["dtype"],
                tuple(form["shape"]),
                written[key][1],
            )
    return Input(name, directory, files, tensors)
