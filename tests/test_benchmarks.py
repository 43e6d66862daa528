"""The benchmarks still run, on tiny inputs, and what they say follows from what was measured."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from benchmarks import inputs, page_cache, process, report
from benchmarks.contenders import READERS, WRITERS
from benchmarks.destination import STATES, destination
from benchmarks.measure import ROOT, Worker, median, rounds, stock_environment

MIB = 1 << 20


def _run(cache: Path, section: str, *only: str) -> tuple[set[tuple[str, str, str | None]], str]:
    """Run the command; returns what it has measured (section, contender, task), and what it printed."""
    command = [sys.executable, "-m", "benchmarks", "--cache", str(cache), "--rounds", "1"]
    command += ["--section", section, "--counts", "90", "--only", *only]
    done = subprocess.run(command, cwd=ROOT, text=True, capture_output=True, check=False)
    assert done.returncode == 0, done.stderr
    records = json.loads((cache / "results.json").read_text())[section]["records"]
    assert not [record["error"] for record in records if "error" in record]
    measured = {
        (record["section"], record["name"], record.get("what"))
        for record in records
        if record.get("seconds", 0) > 0
    }
    return measured, done.stdout


def test_the_command_measures_parts(tmp_path: Path) -> None:
    measured, printed = _run(tmp_path, "tensors", "preadv", "ours-full", "plain", "ours")
    assert measured == {
        ("tensors, read", "preadv", None),
        ("tensors, read", "ours-full", None),
        ("tensors, write", "plain", None),
        ("tensors, write", "ours", None),
    }
    assert "what has to be reached" in printed


@pytest.mark.engine
def test_the_command_measures_whole_models(tmp_path: Path) -> None:
    measured, printed = _run(tmp_path, "many", "ours-full")
    assert measured == {("many", "ours-full", "save"), ("many", "ours-full", "load")}
    assert "where the time goes: many, 90 tensors, save" in printed


@pytest.fixture(scope="module")
def small(tmp_path_factory: pytest.TempPathFactory) -> inputs.Input:
    return inputs.ensure("llama-32", tmp_path_factory.mktemp("bench"))


@pytest.mark.parametrize("state", STATES)
@pytest.mark.parametrize("name", ["preadv", "ours-full", "ours-size", "ours-off"])
def test_readers_fill_every_tensor(small: inputs.Input, name: str, state: str) -> None:
    reader = READERS[name].make()
    with destination(small, state) as into:
        reader.read(small, into)
        for key in into:
            wanted = inputs.noise(key, small.tensors[key].shape)
            assert torch.equal(into[key].view(torch.uint8), wanted.view(torch.uint8)), key


@pytest.mark.parametrize("name", ["plain", "ours", "save_file"])
def test_writers_write_every_byte(small: inputs.Input, name: str, tmp_path: Path) -> None:
    tensors = {key: inputs.noise(key, form.shape) for key, form in small.tensors.items()}
    WRITERS[name].make().write(tmp_path, tensors, sync=False)
    written = b"".join(path.read_bytes() for path in tmp_path.iterdir())
    for key, tensor in tensors.items():
        assert tensor.view(torch.uint8).numpy().tobytes() in written, key


def test_an_input_is_made_again_when_what_it_depends_on_changes(tmp_path: Path) -> None:
    first = inputs.ensure("tiny-10", tmp_path)
    description = first.directory / inputs.DESCRIPTION
    assert inputs.ensure("tiny-10", tmp_path) == first
    description.write_text(description.read_text().replace('"recipe": "', '"recipe": "other'))
    first.paths[0].unlink()
    assert inputs.ensure("tiny-10", tmp_path) == first
    assert first.paths[0].exists()


def test_a_contender_that_leaves_tensors_as_they_were_is_found_out(
    small: inputs.Input, tmp_path: Path
) -> None:
    # What the files hold is no longer what the description says: to the check, nothing was filled.
    path = small.directory / inputs.DESCRIPTION
    description = json.loads(path.read_text())
    other = tmp_path / "other"
    other.mkdir()
    for key, form in description["tensors"].items():
        form["checksum"] = "0" * 32 if "layers.3" in key else form["checksum"]
    (other / inputs.DESCRIPTION).write_text(json.dumps(description))
    for file in small.paths:
        os.link(file, other / file.name)
    worker = Worker("read", "preadv", tmp_path, stock_environment())
    task = {"input": str(other), "state": "touched", "cold": False}
    (record,) = rounds([worker], [task], 1)
    worker.stop()
    assert "6 tensors were not filled" in record["error"]
    assert "seconds" not in record


def test_nobody_to_measure_is_no_record() -> None:
    assert rounds([], [{"input": "anything"}], 2) == []


def test_the_page_cache_is_seen(tmp_path: Path) -> None:
    path = tmp_path / "file"
    path.write_bytes(os.urandom(8 * MIB))
    assert page_cache.resident(path) == 1.0
    path.write_bytes(b"")
    assert page_cache.resident(path) == 1.0


def test_peak_memory_is_seen() -> None:
    def work() -> None:
        torch.ones(64 * MIB, dtype=torch.uint8)

    assert 60 * MIB < process.peak(work) < 90 * MIB


def test_ratios_are_of_the_same_round() -> None:
    # The machine was three times as slow in the second round, for both.
    mine, limit = {"all": [2.0, 6.0, 2.2]}, {"all": [1.0, 3.0, 1.1]}
    assert report.ratio(mine, limit) == pytest.approx(0.5)


def test_the_median_is_a_round_that_was_measured() -> None:
    costs = [{"seconds": s, "user": s / 2} for s in (3.0, 1.0, 2.0, 9.0)]
    assert median(costs) == {"seconds": 2.0, "user": 1.0, "all": [3.0, 1.0, 2.0, 9.0]}


def test_goals_tell_what_is_not_reached() -> None:
    def tensors(count: int, seconds: float) -> dict[str, object]:
        record = {"section": "many", "name": "ours-full", "what": "load", "tensors": count}
        return {**record, "seconds": seconds, "all": [seconds]}

    def read(name: str, seconds: float) -> dict[str, object]:
        return {
            "section": "read",
            "name": name,
            "seconds": seconds,
            "all": [seconds],
            "cold": False,
        }

    records = [read("preadv", 0.9), read("ours-full", 1.0), read("stock", 1.5)]
    records += [tensors(10_000, 0.1), tensors(50_000, 2.0)]
    reached = {what: good for what, *_, good in report.goals(records)}
    assert reached == {
        "read, verify full, of plain preadv (read, warm)": True,
        "read, verify full, times stock (read, warm)": False,
        "µs a tensor at 50,000: many load ours-full": False,
        "growth of that from 10,000: many load ours-full": False,
    }
