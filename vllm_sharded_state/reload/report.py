"""What a reload did: which units it changed, and digests to compare with a sender's."""

from collections.abc import Iterable, Mapping
from typing import Any

from torch import nn

from vllm_sharded_state.state.twin import source_parameters
from vllm_sharded_state.state.units import Unit


def sizes(split: Mapping[str, Unit]) -> dict[str, int]:
    """Bytes of the parameters of each unit that has some; of tied units the first has them."""
    found: dict[str, int] = {}
    seen: set[int] = set()
    for name, unit in split.items():
        parameters = {
            id(t): t for t in source_parameters(unit).values() if isinstance(t, nn.Parameter)
        }
        if parameters:
            found[name] = sum(t.nbytes for key, t in parameters.items() if key not in seen)
            seen |= parameters.keys()
    return found


class Report:
    """The units of a model by what became of them, with the bytes of their parameters.

    seconds: how long it took, without the digests of what there is then. digests: see `entry`.
    """

    def __init__(self, sizes: Mapping[str, int]) -> None:
        """`sizes`: bytes by unit, of all that can be sent."""
        self._sizes = sizes
        self._placed: dict[str, bool] = {}
        self.seconds = 0.0
        self.digests: dict[str, str | list[str]] = {}

    def note(self, unit: str, changed: bool) -> None:
        """All or a part of `unit` was sent, and what is there now differs from what was, or does not."""
        self._placed[unit] = changed or self._placed.get(unit, False)

    @property
    def changed(self) -> list[str]:
        """Units that hold something else than before."""
        return sorted(unit for unit, changed in self._placed.items() if changed)

    @property
    def unchanged(self) -> list[str]:
        """Units that were sent as they were."""
        return sorted(unit for unit, changed in self._placed.items() if not changed)

    @property
    def untouched(self) -> list[str]:
        """Units that could have been sent and were not."""
        return sorted(self._sizes.keys() - self._placed.keys())

    def as_dict(self) -> dict[str, Any]:
        """Everything as strings, numbers and lists of strings."""
        return {
            "changed": self.changed,
            "changed_bytes": self._bytes(self.changed),
            "unchanged": self.unchanged,
            "unchanged_bytes": self._bytes(self.unchanged),
            "untouched": self.untouched,
            "untouched_bytes": self._bytes(self.untouched),
            "seconds": self.seconds,
            **self.digests,
        }

    def __str__(self) -> str:
        counts = ", ".join(
            f"{len(names)} {what} ({self._bytes(names) / 2**20:.1f} MiB)"
            for names, what in (
                (self.changed, "layers changed"),
                (self.unchanged, "sent as they were"),
                (self.untouched, "not sent"),
            )
        )
        digests = "".join(f", {name} {text}" for name, text in self.digests.items() if text)
        return f"{counts}, {self.seconds:.2f} s{digests}"

    def _bytes(self, names: Iterable[str]) -> int:
        return sum(self._sizes.get(name, 0) for name in names)
