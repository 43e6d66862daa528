"""Engines that a session starts once: the reference, the one that saves, the one that loads."""

from pathlib import Path
from typing import Any

from tests.support.engine import Spec, run_engine
from tests.support.lab import WITH_OURS, Result, Zoo, without_ours
from tests.zoo.kinds import KINDS


class EngineLab:
    """Results of engine processes by what they did; each process runs when first asked for."""

    def __init__(self, zoo: Zoo, root: Path) -> None:
        self.zoo = zoo
        self.root = root
        self._done: dict[tuple[str, ...], Result] = {}

    def saved(self, kind: str, way: str, layout: str) -> Path:
        return self.root / f"{kind}.{way}.{layout}"

    def reference(self, kind: str, way: str) -> Result:
        """Stock vLLM, our plugin disabled, on the original checkpoint."""
        return self._once(("reference", kind, way), self._spec(kind), way, without_ours(way))

    def saving(self, kind: str, way: str, layout: str) -> Result:
        """The original checkpoint with our plugin: generates, saves, generates again."""
        spec = self._spec(kind, save=str(self.saved(kind, way, layout)), again=True)
        key = ("saving", kind, way, layout)
        return self._once(key, spec, way, WITH_OURS, VSS_LAYOUT=layout)

    def loading(self, kind: str, way: str, layout: str) -> Result:
        """Another process, started from what `saving` saved."""
        spec = self._spec(kind, mutate=None)
        spec.model = str(self.saved(kind, way, layout))
        spec.engine |= {"load_format": "sharded_state"}
        return self._once(("loading", kind, way, layout), spec, way, WITH_OURS)

    def _spec(self, kind: str, **more: Any) -> Spec:
        found = KINDS[kind]
        settings: dict[str, Any] = {
            "model": str(self.zoo.path(kind)),
            "engine": dict(found.engine),
            "mutate": found.mutate,
            "pooling": found.pooling,
            "snapshot": True,
        }
        return Spec(**(settings | more))

    def _once(self, key: tuple[str, ...], spec: Spec, way: str, plugins: str, **env: str) -> Result:
        if key not in self._done:
            self._done[key] = run_engine(spec, way, plugins, **env)
        return self._done[key]


def explain(result: Result) -> str:
    """The error of an engine in full, with what its process printed, for an assertion's message."""
    error = result["error"]
    return "" if error is None else f"{error['traceback']}\n{result['log'][-4000:]}"
