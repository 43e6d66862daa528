"""`vllm-sharded-state inspect` and `verify`, against numbers read from the files in another way."""

import json
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from tests.support import edit, manifests
from tests.support.batch import run_batch
from tests.support.lab import WITH_OURS, explain, sharded
from tests.zoo import decoders
from tests.zoo import quantize as q
from tests.zoo.kinds import TENSORS
from vllm_sharded_state import cli
from vllm_sharded_state.checkpoint.manifest import read

KIND = "llama-kv-head"
PART = 256 * 1024


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Two models of one architecture in runtime layout, and the first in source layout."""
    root = tmp_path_factory.mktemp("cli")
    jobs = []
    for name, seed, layout in (
        ("one", 0, "runtime"),
        ("two", 1, "runtime"),
        ("plain", 0, "source"),
    ):
        model = q.kv_per_head(decoders.llama(seed=seed)).write(root / "models" / name)
        job = sharded(KIND, model, id=name, save=str(root / name))
        del job.engine["load_format"]
        job.layout, job.max_size = layout, PART
        jobs.append(job)
    for name, result in run_batch(jobs, TENSORS, WITH_OURS).items():
        assert result["error"] is None, f"{name}: {explain(result)}"
    return {job.id: root / job.id for job in jobs}


def run(capsys: pytest.CaptureFixture[str], *arguments: object) -> tuple[int, str]:
    code = cli.main([str(argument) for argument in arguments])
    captured = capsys.readouterr()
    return code, captured.out + captured.err


def found(capsys: pytest.CaptureFixture[str], *arguments: object) -> dict:
    code, text = run(capsys, *arguments, "--json")
    return {"exit": code, **json.loads(text)}


def tensors(directory: Path) -> dict[str, torch.Tensor]:
    return {
        key: tensor
        for path in directory.glob("*.safetensors")
        for key, tensor in load_file(path).items()
    }


def damaged(directory: Path, to: Path) -> tuple[Path, str]:
    """A copy of which one bit is flipped in the last tensor of a part; and that tensor's key."""
    shutil.copytree(directory, to)
    part = edit.parts(to)[0]
    header = json.loads(part.read_bytes()[8 : 8 + int.from_bytes(part.read_bytes()[:8], "little")])
    header.pop("__metadata__", None)
    key = max(header, key=lambda name: header[name]["data_offsets"][1])
    data = bytearray(part.read_bytes())
    data[-1] ^= 1
    part.write_bytes(data)
    return to, key


@pytest.mark.parametrize("name", ["one", "plain"])
def test_inspect_counts_what_the_files_hold(
    saved: dict[str, Path], name: str, capsys: pytest.CaptureFixture[str]
) -> None:
    held = tensors(saved[name])
    facts = found(capsys, "inspect", saved[name])
    assert facts["exit"] == 0
    (rank,) = facts["ranks"]
    assert rank["parts"] == {p.name: p.stat().st_size for p in saved[name].glob("*.safetensors")}
    assert rank["tensors"] == len(held)
    assert sum(rank["bytes"].values()) == sum(tensor.nbytes for tensor in held.values())
    for scale in facts["kv_scales"]:
        buffer = "_" if name == "one" else ""
        tensor = held[f"{scale['layer']}.{buffer}{scale['kind']}_scale"]
        assert scale["heads"] == tensor.numel() > 1
        assert (scale["min"], scale["max"]) == (tensor.min().item(), tensor.max().item())
    layers = json.loads((saved[name] / "config.json").read_text())["num_hidden_layers"]
    assert len(facts["kv_scales"]) == 2 * layers


def test_inspect_says_where_it_may_be_loaded(
    saved: dict[str, Path], capsys: pytest.CaptureFixture[str]
) -> None:
    assert found(capsys, "inspect", saved["plain"])["needs"] == {}
    needs = found(capsys, "inspect", saved["one"])["needs"]
    assert needs["torch"] == {"saved": torch.__version__, "here": torch.__version__}
    _, text = run(capsys, "inspect", saved["one"], "--tensors", "*.norm.weight")
    assert "loads into" in text
    assert "model.norm.weight" in text
    assert "gate_up" not in text


def test_verify_reads_everything(
    saved: dict[str, Path], capsys: pytest.CaptureFixture[str]
) -> None:
    result = found(capsys, "verify", saved["one"])
    held = tensors(saved["one"])
    assert (result["exit"], result["problems"]) == (0, [])
    assert (result["tensors"], result["bytes"]) == (
        len(held),
        sum(tensor.nbytes for tensor in held.values()),
    )


def test_verify_names_a_tensor_with_one_bit_flipped(
    saved: dict[str, Path], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    directory, key = damaged(saved["one"], tmp_path / "damaged")
    code, text = run(capsys, "verify", directory)
    assert code == 1
    assert key in text
    assert "Copy what is damaged again" in text


def test_verify_notes_what_was_changed_beside_the_weights(
    saved: dict[str, Path], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    directory = tmp_path / "edited"
    shutil.copytree(saved["one"], directory)
    assert found(capsys, "verify", directory)["notes"] == []
    (directory / "config.json").write_text("{}")
    result = found(capsys, "verify", directory)
    assert (result["exit"], result["notes"]) == (
        0,
        ["config.json was changed after the save (no weights)"],
    )
    (directory / "config.json").unlink()
    assert found(capsys, "verify", directory)["notes"] == [
        "config.json is not there any more (no weights)"
    ]


def test_names_are_shown_as_they_are(
    saved: dict[str, Path], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    directory = tmp_path / "renamed"
    shutil.copytree(saved["one"], directory)
    manifest = read(directory)
    manifest.source.name = "/data/[red]x[/b]/model"
    manifests.write(directory, manifest)
    code, text = run(capsys, "inspect", directory)
    assert code == 0
    assert "/data/[red]x[/b]/model" in text


def test_verify_tells_two_saves_apart(
    saved: dict[str, Path], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    one, two = tensors(saved["one"]), tensors(saved["two"])
    different = {key for key in one if not torch.equal(one[key], two[key])}
    assert different
    result = found(capsys, "verify", saved["one"], "--against", saved["two"])
    assert result["exit"] == 1
    names = {entry["name"]: entry["how"] for entry in result["different"]}
    assert different <= names.keys()
    key = "model.layers.0.mlp.down_proj.weight"
    apart = (one[key].double() - two[key].double()).abs()
    assert names[key] == (
        f"{int((apart > 0).sum())} of {apart.numel()} elements, the largest difference "
        f"{apart.max().item():.6g}"
    )
    other, key = damaged(saved["two"], tmp_path / "damaged")
    code, text = run(capsys, "verify", saved["one"], "--against", other)
    assert (code, key in text) == (1, True)
    same = found(capsys, "verify", saved["one"], "--against", saved["one"])
    assert (same["exit"], same["different"]) == (0, [])


def test_errors_are_one_message_and_exit_code_1(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for command in ("inspect", "verify"):
        code, text = run(capsys, command, tmp_path)
        assert code == 1
        assert text.startswith(f"ManifestError: {tmp_path} has no sharded_state.json")
        code, text = run(capsys, command, tmp_path / "nowhere", "--json")
        assert (code, json.loads(text)["error"]) == (1, "ManifestError")
    with pytest.raises(SystemExit) as stopped:
        cli.main(["inspect"])
    assert stopped.value.code == 2


def test_help_imports_neither_torch_nor_vllm() -> None:
    script = (
        "import sys\nfrom vllm_sharded_state.cli import main\n"
        "try:\n    main(['verify', '--help'])\n"
        "finally:\n    print(sorted({'torch', 'vllm', 'msgspec'} & sys.modules.keys()))"
    )
    done = subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True, check=True
    )
    assert "--against" in done.stdout
    assert done.stdout.rstrip().endswith("[]")
