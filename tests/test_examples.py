"""The examples do what they promise: each prints its own comparison, which is looked at here."""

import re
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.engine

EXAMPLES = Path(__file__).resolve().parent.parent / "examples"
#: A step of the loop: its number, and the loss by the engine and by the trainer.
STEP = re.compile(r"^  (\d+) +([\d.]+) +([\d.]+) ", re.MULTILINE)


def test_an_engine_follows_its_trainer() -> None:
    command = [sys.executable, str(EXAMPLES / "rl_weight_sync.py"), "--steps", "2"]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-4000:]
    steps = [
        (int(n), float(engine), float(trainer)) for n, engine, trainer in STEP.findall(done.stdout)
    ]
    assert [number for number, _, _ in steps] == [0, 1, 2]
    losses = [engine for _, engine, _ in steps]
    assert losses[0] - losses[2] > 0.5
    # The trainer has no FP8 KV cache; a push that was lost would leave them a step apart.
    for _, engine, trainer in steps:
        assert engine == pytest.approx(trainer, abs=0.1)
    assert "99 logprobs identical, bit for bit" in done.stdout
