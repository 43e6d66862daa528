"""Who is measured. Each runs in a process of its own, and is imported there only.

A reader has `read(given, into)`: read every tensor of `given` into `into`, opening the files and all.
A writer has `write(directory, tensors, sync)`: write `tensors` to `directory`, and where `sync` is
true make sure that they are on the disk. Both are made with the input once, which is not measured.
"""

import importlib
import importlib.util
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any


@dataclass(frozen=True)
class Contender:
    """`module:symbol` with the arguments `given`; `needs` names the module that has to be installed.

    `environment` is set in its process beside what all have.
    """

    says: str
    where: str
    given: Mapping[str, Any]
    needs: str | None = None
    gpu: bool = False
    environment: Mapping[str, str] = field(default_factory=dict)

    def missing(self) -> str | None:
        """Why it can't run here, or None."""
        if self.gpu and not Path("/proc/driver/nvidia/version").exists():
            return "not here: it needs a GPU"
        if self.needs and importlib.util.find_spec(self.needs) is None:
            return f"not here: {self.needs} is not installed"
        return None

    def make(self) -> Any:
        """The contender itself."""
        module, _, symbol = self.where.partition(":")
        maker = getattr(importlib.import_module(f"benchmarks.contenders.{module}"), symbol)
        return maker(**self.given)


READERS = {
    "preadv": Contender("the limit: plain parallel preadv", "limit:Preadv", {}),
    "ours-full": Contender("ours, verify full", "ours:Reader", {"verify": "full"}),
    "ours-size": Contender("ours, verify size", "ours:Reader", {"verify": "size"}),
    "ours-off": Contender("ours, verify off", "ours:Reader", {"verify": "off"}),
    "stock": Contender("stock sharded state", "upstream:Sharded", {}, "vllm"),
    # vLLM gives a worker its share of the cores (`startup_omp_num_threads` in utils/torch_utils.py):
    # one, where there are as many ranks as cores.
    "stock-1-thread": Contender(
        "stock sharded state, OMP_NUM_THREADS=1",
        "upstream:Sharded",
        {},
        "vllm",
        environment={"OMP_NUM_THREADS": "1"},
    ),
    "default": Contender("vLLM's default safetensors loading", "upstream:Default", {}, "vllm"),
    # Both of these read past the page cache (O_DIRECT) as they come.
    "runai": Contender("runai-model-streamer", "others:Runai", {}, "runai_model_streamer"),
    "runai-buffered": Contender(
        "runai-model-streamer, through the page cache",
        "others:Runai",
        {},
        "runai_model_streamer",
        environment={"RUNAI_STREAMER_FS_STRATEGY": "sync_buffered"},
    ),
    "fastsafetensors": Contender(
        "fastsafetensors without GDS", "others:FastSafetensors", {}, "fastsafetensors"
    ),
    "fastsafetensors-buffered": Contender(
        "fastsafetensors without GDS, through the page cache",
        "others:FastSafetensors",
        {},
        "fastsafetensors",
        environment={"FASTSAFETENSORS_ODIRECT": "0"},
    ),
    "instanttensor": Contender(
        "InstantTensor", "others:InstantTensor", {}, "instanttensor", gpu=True
    ),
}

WRITERS = {
    "plain": Contender("the limit: plain write", "limit:Plain", {}),
    "ours": Contender("ours, with checksums", "ours:Writer", {}),
    "save_file": Contender("safetensors.torch.save_file", "others:SaveFile", {}),
    "stock": Contender("stock save_sharded_state", "upstream:ShardedSave", {}, "vllm"),
}
