"""A checkpoint in memory: a config, named tensors, and how both are written to a directory."""

import json
import zlib
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file


def noise(name: str, *shape: int, std: float | None = None, seed: int = 0) -> torch.Tensor:
    """Normal bf16 values that depend on `name` and `seed` only; `std` defaults to 1/sqrt(last dim)."""
    generator = torch.Generator().manual_seed(zlib.crc32(name.encode()) + seed)
    if std is None:
        std = shape[-1] ** -0.5
    return (torch.randn(*shape, generator=generator) * std).to(torch.bfloat16)


def gain(name: str, *shape: int, around: float = 1.0, seed: int = 0) -> torch.Tensor:
    """Values near `around`, for norms: none of them is the value that a missing tensor would get."""
    return (noise(name, *shape, std=0.2, seed=seed).float() + around).to(torch.bfloat16)


class Scales:
    """Hands out scales k/64, k = first, first+step, ...: all positive, all different, exact in bf16.

    A scale that bf16 holds exactly is the same whether or not the loader keeps fp32, so a reference
    made by stock vLLM agrees with ours.
    """

    def __init__(self, first: int = 3, step: int = 2) -> None:
        self._next = first
        self._step = step

    def take(self, *shape: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
        count = 1
        for size in shape:
            count *= size
        last = self._next + self._step * (count - 1)
        if last > 255:
            raise ValueError(f"{last}/64 is not exact in bf16: use fewer scales or a smaller step")
        values = torch.arange(self._next, last + 1, self._step, dtype=torch.float32) / 64
        self._next = last + self._step
        return values.reshape(shape).to(dtype)


@dataclass
class Checkpoint:
    """What a model directory holds: config.json, the weight files, and `files` of other text."""

    config: dict[str, Any]
    tensors: dict[str, torch.Tensor] = field(default_factory=dict)
    files: dict[str, str] = field(default_factory=dict)

    def write(self, directory: Path, files: int = 2) -> Path:
        """Write to `directory` in `files` safetensors files with an index, and return it."""
        directory.mkdir(parents=True, exist_ok=True)
        (directory / "config.json").write_text(json.dumps(self.config, indent=1, sort_keys=True))
        # A file that is not a weight: a saved directory has to carry it along.
        (directory / "generation_config.json").write_text(json.dumps({"_from_model_config": True}))
        for name, text in self.files.items():
            (directory / name).write_text(text)
        names = sorted(self.tensors)
        weight_map: dict[str, str] = {}
        for index in range(files):
            # Round robin, so that the tensors of one fused module lie in different files.
            chosen = names[index::files]
            file = f"model-{index + 1:05d}-of-{files:05d}.safetensors"
            save_file(
                {name: self.tensors[name].contiguous() for name in chosen},
                directory / file,
                metadata={"format": "pt"},
            )
            weight_map.update(dict.fromkeys(chosen, file))
        index_file = directory / "model.safetensors.index.json"
        index_file.write_text(json.dumps({"metadata": {}, "weight_map": weight_map}))
        return directory


Builder = Callable[[], Checkpoint]
Transform = Callable[[Checkpoint], Checkpoint]


def chain(build: Builder, *transforms: Transform) -> Builder:
    """A builder that applies `transforms`, in order, to what `build` makes."""

    def built() -> Checkpoint:
        checkpoint = build()
        for transform in transforms:
            checkpoint = transform(checkpoint)
        return checkpoint

    return built
