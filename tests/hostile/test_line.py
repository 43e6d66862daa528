"""Where the line is: what options forgive, what an author of checkpoints may write, and what neither may.

A checksum is no signature. Who writes a manifest anew may exchange two norms, and has made another
checkpoint: it loads, as exactly what it says. Linear layers are held to what they computed.
"""

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

from tests.hostile import spoil
from tests.hostile.goods import Yard
from tests.hostile.meaning_cases import DOWN0, FLOAT, NORM0, NORM1, exchange
from tests.support import edit
from tests.support.lab import Result, explain
from tests.support.snapshot import differences

pytestmark = pytest.mark.engine


@dataclass(frozen=True)
class Try:
    """`change` spoils `base`, which is loaded with `extra` options.

    `changed`: the only tensors that may differ from the good directory's; None: it has to be refused
    with each of `words`.
    """

    base: str
    change: Callable[[Path], object]
    extra: Mapping[str, Any] = field(default_factory=dict)
    changed: tuple[str, ...] | None = None
    words: tuple[str, ...] = ()


def _flip(path: str) -> Callable[[Path], None]:
    """A bit of a tensor, in its file; no checksum is told."""

    def change(directory: Path) -> None:
        entry = edit.read_manifest(directory)["ranks"][0]["tensors"][path]
        file = directory / entry["file"]
        data = bytearray(file.read_bytes())
        start = 8 + int.from_bytes(data[:8], "little")
        data[start + spoil.tensors_of(file)[entry["key"]]["data_offsets"][0]] ^= 1
        spoil.write(file, bytes(data))

    return change


def _ranks(change: Callable[[spoil.Data], object]) -> Callable[[Path], None]:
    return lambda directory: spoil.edit_manifest(
        directory, lambda m: change(m["ranks"][0]) and None
    )


def _tied(value: bool) -> Callable[[Path], None]:
    return lambda directory: spoil.edit_manifest(
        directory, lambda manifest: manifest.update(tied_word_embeddings=value)
    )


def _tie_config(directory: Path) -> None:
    path = directory / "config.json"
    config = json.loads(path.read_text()) | {"tie_word_embeddings": True}
    spoil.write(path, json.dumps(config).encode())


def _tied_by_all(directory: Path) -> None:
    _tie_config(directory)
    _tied(True)(directory)


def _header(directory: Path) -> None:
    """A dtype of the same size, in a header whose checksum nobody compares."""
    path = spoil.main_part(directory)
    header, data = spoil.split(path)
    spoil.write(path, spoil.join(header.replace(b'"BF16"', b'"F16" ', 1), data))


def _nothing(directory: Path) -> None:
    assert directory.is_dir()


ELSEWHERE = "../../good/runtime-tuned/model-rank-{rank}-part-{part}.safetensors"
LENIENT = {"strict": False}
TRIES: dict[str, Try] = {
    "two norms exchanged": Try("runtime", _ranks(exchange(NORM0, NORM1)), changed=(NORM0, NORM1)),
    "two norms exchanged in source layout": Try(
        "source", _ranks(exchange(NORM0, NORM1)), changed=(NORM0, NORM1)
    ),
    "a norm's bit, unverified": Try("runtime", _flip(NORM0), {"verify": "off"}, changed=(NORM0,)),
    "a norm's bit, by size": Try("runtime", _flip(NORM0), {"verify": "size"}, changed=(NORM0,)),
    "a norm's bit, in full": Try("runtime", _flip(NORM0), {"verify": "full"}, words=(NORM0,)),
    "a weight's bit, unverified": Try(
        "runtime", _flip(DOWN0), {"verify": "off"}, words=("0.mlp.down",)
    ),
    "a weight's bit, by size": Try(
        "source", _flip(DOWN0), {"verify": "size"}, words=("0.mlp.down",)
    ),
    "a norm's bit, lenient": Try("runtime", _flip(NORM0), LENIENT, words=(NORM0,)),
    "a header, unverified": Try(
        "runtime", _header, {"verify": "off"}, words=("model-rank-0-part-0",)
    ),
    "a header, by size": Try(
        "runtime", _header, {"verify": "size"}, words=("model-rank-0-part-0",)
    ),
    "a part gone, lenient and unverified": Try(
        "runtime",
        lambda directory: spoil.last_part(directory).unlink(),
        {"strict": False, "verify": "off"},
        words=("model-rank-0-part-2",),
    ),
    "a forged mirror, lenient": Try(
        "runtime",
        _ranks(lambda rank: rank["values"][FLOAT].update(value={"float": "0x1p-3"})),
        LENIENT,
        words=("_k_scale_float",),
    ),
    "another model's manifest, lenient": Try(
        "runtime",
        lambda directory: spoil.write(
            spoil.manifest_file(directory),
            (directory.parents[1] / "good" / "biased" / edit.MANIFEST).read_bytes(),
        ),
        {"strict": False, "verify": "off"},
        words=("attention_bias",),
    ),
    "a pattern that leads elsewhere": Try("runtime", _nothing, {"pattern": ELSEWHERE}, changed=()),
    "tied, and said not to be": Try("tied", _tied(False), words=("lm_head",)),
    # Only a config that ties them asks; this one does not.
    "not tied, and said to be": Try("runtime", _tied(True), changed=()),
    "not tied, and said to be by all": Try("runtime", _tied_by_all, words=("embed_tokens",)),
    "not tied, and the config says so": Try("runtime", _tie_config, changed=()),
}


@pytest.fixture(scope="module")
def tries(yard: Yard) -> dict[str, Result]:
    jobs = []
    for number, (name, one) in enumerate(TRIES.items()):
        directory = edit.copy(yard.good(one.base), yard.root / "tries" / str(number))
        one.change(directory)
        job = yard.job(one.base, directory, id=name, snapshot=True, kernels=True)
        job.engine["model_loader_extra_config"] = dict(one.extra)
        jobs.append((one.base, job))
    return yard.load(jobs)


@pytest.mark.parametrize("name", TRIES)
def test_what_loads_and_what_does_not(yard: Yard, tries: dict[str, Result], name: str) -> None:
    one, result = TRIES[name], tries[name]
    if one.changed is None:
        assert result["error"] is not None, "it was loaded"
        assert "ShardedStateError" in result["error"]["bases"], explain(result)
        for word in one.words:
            assert word in result["error"]["message"]
        return
    assert result["error"] is None, explain(result)
    lines = differences(result["snapshot"], yard.snapshots[one.base]["snapshot"])
    assert sorted(line.split(" is ")[0] for line in lines) == [
        f"tensors: {path}" for path in sorted(one.changed)
    ]


def test_norms_that_were_exchanged_are_each_others(yard: Yard, tries: dict[str, Result]) -> None:
    for name, base in (
        ("two norms exchanged", "runtime"),
        ("two norms exchanged in source layout", "source"),
    ):
        found = tries[name]["snapshot"]["tensors"]
        good = yard.snapshots[base]["snapshot"]["tensors"]
        assert found[NORM0] == good[NORM1]
        assert found[NORM1] == good[NORM0]
