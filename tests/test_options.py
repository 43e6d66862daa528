"""What callers can say: pattern, part size, layout, by each of the ways that there are to say it."""

import json
import shutil
from pathlib import Path

import pytest
from safetensors.torch import load_file

from tests.support.batch import run_batch
from tests.support.lab import WITH_OURS, Result, Zoo, explain, sharded, without_ours
from tests.support.snapshot import differences
from tests.zoo.kinds import TENSORS

pytestmark = pytest.mark.engine

KIND = "llama-kv"
PATTERN = "weights-of-{rank}-{part}.safetensors"
LIMIT = 128 * 1024
DAMAGED = "model.norm.weight"  # no kernel is run to prove it


class Said:
    def __init__(self, zoo: Zoo, root: Path) -> None:
        self.root, self.zoo = root, zoo
        self.reference = run_batch([zoo.job(KIND)], TENSORS, without_ours(TENSORS))[KIND]

        def save(name: str, **more: object):  # type: ignore[no-untyped-def]
            return zoo.job(KIND, id=name, save=str(root / name), **more)

        def start(name: str, saved: str, **extra: object):  # type: ignore[no-untyped-def]
            job = sharded(KIND, root / saved, id=name)
            job.engine |= {"model_loader_extra_config": extra}
            return job

        self.saves = run_batch(
            [
                save("pattern", pattern=PATTERN, max_size=LIMIT),
                save("default"),
                save("by environment", layout="source"),
                save("nonsense", layout="sideways"),
                # A second save of a tokenizer's model: files beside the weights come along.
                zoo.job("bert", id="bert", save=str(root / "bert"), snapshot=False),
            ],
            TENSORS,
            WITH_OURS,
        )
        # Started from source layout, and asked to save in the other one.
        by_key = sharded(KIND, root / "by environment", id="by key", save=str(root / "by key"))
        by_key.engine |= {"model_loader_extra_config": {"layout": "runtime"}}
        shutil.copytree(root / "default", root / "damaged")
        _flip_a_bit(root / "damaged", DAMAGED)
        self.loads = run_batch(
            [
                start("pattern", "pattern", pattern=PATTERN),
                start("no pattern", "pattern"),
                start("strict", "default", strict=True),
                start("strict is no bool", "default", strict="yes"),
                start("verify", "damaged", verify="full"),
                start("verify size", "damaged", verify="size"),
                start("verify off", "damaged", verify="off"),
                start("verify sideways", "default", verify="sideways"),
                by_key,
            ],
            TENSORS,
            WITH_OURS,
        )


@pytest.fixture(scope="module")
def said(zoo: Zoo, tmp_path_factory: pytest.TempPathFactory) -> Said:
    return Said(zoo, tmp_path_factory.mktemp("options"))


def _flip_a_bit(directory: Path, key: str) -> None:
    for path in directory.glob("model-rank-*.safetensors"):
        data = bytearray(path.read_bytes())
        begin = 8 + int.from_bytes(data[:8], "little")
        header = json.loads(data[8:begin])
        if key in header:
            data[begin + header[key]["data_offsets"][0]] ^= 1
            path.write_bytes(data)
            return
    raise AssertionError(f"no part holds {key}")


def _layouts(directory: Path) -> set[str]:
    manifest = json.loads((directory / "sharded_state.json").read_text())
    return {unit["layout"] for unit in manifest["ranks"][0]["units"].values()}


def _equal(said: Said, result: Result) -> None:
    assert result["error"] is None, explain(result)
    assert differences(result["snapshot"], said.reference["snapshot"]) == []


def test_a_pattern_and_a_part_size_of_ones_own(said: Said) -> None:
    assert said.saves["pattern"]["error"] is None, explain(said.saves["pattern"])
    parts = sorted((said.root / "pattern").glob("weights-of-0-*.safetensors"))
    assert len(parts) > 2
    assert not list((said.root / "pattern").glob("model-rank-*"))
    for path in parts:
        sizes = [tensor.nbytes for tensor in load_file(path).values()]
        assert sum(sizes) <= LIMIT or len(sizes) == 1, path
    _equal(said, said.loads["pattern"])


def test_another_pattern_than_the_saved_one_loads_or_is_refused(said: Said) -> None:
    result = said.loads["no pattern"]
    if result["error"] is None:  # The manifest names the files.
        _equal(said, result)
    else:
        assert "ShardedStateError" in result["error"]["bases"], explain(result)


def test_layouts_by_each_way_to_ask(said: Said) -> None:
    assert _layouts(said.root / "default") == {"runtime"}
    assert _layouts(said.root / "by environment") == {"source"}
    assert _layouts(said.root / "by key") == {"runtime"}
    _equal(said, said.loads["by key"])


def test_options_that_mean_nothing_are_refused(said: Said) -> None:
    wrong = said.saves["nonsense"]
    assert wrong["error"] is not None
    assert wrong["error"]["type"] == "OptionError", explain(wrong)
    assert "sideways" in wrong["error"]["message"]
    assert said.loads["strict is no bool"]["error"]["type"] == "OptionError"
    _equal(said, said.loads["strict"])


def test_files_beside_the_weights_come_along(said: Said) -> None:
    assert said.saves["bert"]["error"] is None, explain(said.saves["bert"])
    for path in said.zoo.path("bert").iterdir():
        copy = said.root / "bert" / path.name
        if path.suffix == ".safetensors" or path.name.endswith(".index.json"):
            assert not copy.exists(), "the source's weights were copied along"
        else:
            assert copy.read_bytes() == path.read_bytes()
            assert not copy.is_symlink()


def test_a_damaged_tensor_is_named_unless_checksums_were_not_wanted(said: Said) -> None:
    error = said.loads["verify"]["error"]
    assert error["type"] == "IncompleteError", explain(said.loads["verify"])
    assert f"  {DAMAGED} in model-rank-0-part-0.safetensors" in error["message"].splitlines()
    for name in ("verify size", "verify off"):
        assert said.loads[name]["error"] is None, explain(said.loads[name])
        changed = differences(said.loads[name]["snapshot"], said.reference["snapshot"])
        assert len(changed) == 1
        assert DAMAGED in changed[0]
    assert said.loads["verify sideways"]["error"]["type"] == "OptionError"
