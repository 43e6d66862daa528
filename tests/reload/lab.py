"""What is reloaded in the tests here: one process a way with our plugin, and one without."""

from concurrent.futures import ThreadPoolExecutor
from functools import cached_property
from pathlib import Path
from typing import Any

import torch

from tests.reload.kinds import ALL, REGISTERED, new
from tests.reload.steps import Job, run_steps
from tests.support.lab import WITH_OURS, without_ours
from tests.zoo import decoders
from tests.zoo import quantize as q
from tests.zoo.checkpoint import Checkpoint

#: A scale that float32 holds and bfloat16 does not.
EXACT = 0.0123


def exact_scales() -> Checkpoint:
    """Every KV scale is `EXACT`."""
    checkpoint = q.fp8_config_kv_only(decoders.llama())
    for name, tensor in checkpoint.tensors.items():
        if name.endswith("_scale"):
            checkpoint.tensors[name] = torch.full_like(tensor, EXACT)
    return checkpoint


class ReloadLab:
    """The jobs of one way. `old` and `new` are the checkpoints of a kind before and after an update."""

    def __init__(self, way: str, root: Path, jobs: "dict[str, Any]", kinds: set[str]) -> None:
        self.way, self.root = way, root
        self._jobs, self._kinds = jobs, kinds
        self._saves: dict[str, Job] = {}

    def old(self, kind: str) -> Path:
        return self._written(f"{kind}.old", lambda: ALL[kind].build())

    def new(self, kind: str) -> Path:
        return self._written(f"{kind}.new", lambda: new(kind))

    def exact(self) -> Path:
        return self._written("exact", exact_scales)

    def truncated(self, kind: str) -> Path:
        """The new checkpoint, of which one file ends in the middle."""
        path = self.root / f"{kind}.truncated"
        if not path.exists():
            new(kind).write(path)
            last = sorted(path.glob("*.safetensors"))[-1]
            last.write_bytes(last.read_bytes()[: last.stat().st_size // 2])
        return path

    def sharded(self, kind: str, layout: str, checkpoint: str = "new") -> Path:
        """The sharded state of an engine on one of the checkpoints, changed by hand as the kind says."""
        name = f"{kind}.{checkpoint}.{layout}.sharded"
        path = self.root / self.way / name
        if name not in self._saves:
            path.parent.mkdir(exist_ok=True)
            model = self.old(kind) if checkpoint == "old" else self.new(kind)
            self._saves[name] = self.job(
                name, kind, model=str(model), save=str(path), layout=layout
            )
        return path

    def _written(self, name: str, build: Any) -> Path:
        path = self.root / name
        if not path.exists():
            build().write(path)
        return path

    def job(self, name: str, kind: str, *steps: dict[str, Any], **more: Any) -> Job:
        settings: dict[str, Any] = {
            "id": name,
            "model": str(self.old(kind)),
            "engine": dict(ALL[kind].engine),
            "mutate": ALL[kind].mutate,
            "register": REGISTERED.get(kind),
            "steps": list(steps),
        }
        return Job(**(settings | more))

    def fresh(self, kind: str) -> Job:
        """The new checkpoint, loaded afresh."""
        return self.job(f"fresh.{kind}", kind, model=str(self.new(kind)), digest=True)

    @property
    def ours(self) -> dict[str, Any]:
        """By job: what happens with our plugin."""
        return self._both[0]

    @property
    def stock(self) -> dict[str, Any]:
        """By job: what happens without it; and `fresh.KIND`, what a cold load of the new one holds."""
        return self._both[1]

    @cached_property
    def _both(self) -> tuple[dict[str, Any], dict[str, Any]]:
        ours = [make(self) for make in self._jobs.values()]
        stock = [self.fresh(kind) for kind in sorted(self._kinds)]
        stock += [make(self) for name, make in self._jobs.items() if name.startswith("stock ")]
        ours = [*self._saves.values(), *ours]
        with ThreadPoolExecutor(2) as pool:  # two processes, side by side
            first = pool.submit(run_steps, ours, self.way, WITH_OURS)
            second = pool.submit(run_steps, stock, self.way, without_ours(self.way))
            return first.result(), second.result()
