"""What a step of a job has to have come to, as several tests ask it."""

from typing import Any

from tests.reload import cases
from tests.reload.lab import ReloadLab
from tests.support.snapshot import differences


def unharmed(step: dict[str, Any], before: dict[str, Any]) -> None:
    """The step failed, and the model is what it was, where it was."""
    assert step["error"] is not None, "it was taken"
    assert step["moved"] == []
    assert not step["renamed"]
    assert differences(step["snapshot"], before) == []


def renewed(step: dict[str, Any], lab: ReloadLab, kind: str) -> None:
    """The step gave what a cold load of the new checkpoint gives."""
    assert step["error"] is None, step["error"]["traceback"]
    assert differences(step["snapshot"], lab.stock[f"fresh.{kind}"]["before"]) == []


def refused_then_renewed(lab: ReloadLab, job: str, error: str, named: str = "") -> None:
    """The first of two steps fails with `Reload{error}`, which names `named`; the second is taken."""
    result = lab.ours[job]
    assert result["error"] is None, result["error"]
    failed, good = result["steps"]
    unharmed(failed, result["before"])
    assert failed["error"]["type"] == f"Reload{error}", failed["error"]["traceback"]
    assert named in failed["error"]["message"]
    renewed(good, lab, cases.kind_of(job))
