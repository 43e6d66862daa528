"""Gemma 3 270M, plain and quantized by llm-compressor: saved, loaded in another process, the same."""

import subprocess
import sys
from pathlib import Path

import pytest
from tokenizers import Tokenizer

from tests.support.engine import Spec, run_engine
from tests.support.engine_lab import explain
from tests.support.lab import WITH_OURS, without_ours
from tests.support.process import ROOT
from tests.support.snapshot import differences
from tests.zoo.kinds import PACKED, TENSORS

pytestmark = pytest.mark.engine

KV = {"kv_cache_dtype": "fp8"}
MODELS = {"gemma": {}, "gemma-kv": KV, "gemma-kv-head": KV, "gemma-w8a8-kv": KV}
RUNS = [
    *((name, PACKED, "auto") for name in MODELS),
    *((name, TENSORS, "runtime") for name in MODELS if "w8a8" not in name),
]
BOS = 2
SENTENCES = [
    "The lighthouse keeper climbed the stairs and",
    "Water boils at a lower temperature in the mountains because",
]


def _model(name: str) -> Path:
    """The directory of a real model, built where it is missing."""
    program = ROOT / "tools" / "models.py"
    done = subprocess.run(
        [sys.executable, str(program), name], stdout=subprocess.PIPE, text=True, check=True
    )
    return Path(done.stdout.strip())


def _spec(model: Path, name: str, **more: object) -> Spec:
    tokenizer = Tokenizer.from_file(str(model / "tokenizer.json"))
    prompts = [[BOS, *(i for i in tokenizer.encode(text).ids if i != BOS)] for text in SENTENCES]
    return Spec(str(model), dict(MODELS[name]), prompts, max_tokens=24, snapshot=True, **more)


@pytest.mark.parametrize(
    ("name", "way", "layout"),
    [pytest.param(*run, marks=pytest.mark.full if run[1] == TENSORS else ()) for run in RUNS],
)
def test_a_real_model_comes_back(name: str, way: str, layout: str, tmp_path: Path) -> None:
    source = _model(name)
    reference = run_engine(_spec(source, name), way, without_ours(way))
    assert reference["error"] is None, explain(reference)
    tokens = [one["tokens"] for one in reference["outputs"]]
    assert tokens[0] != tokens[1]
    assert all(len(set(one)) > 8 for one in tokens), "real text repeats little"

    saved = tmp_path / "saved"
    saving = run_engine(
        _spec(source, name, save=str(saved), again=True), way, WITH_OURS, VSS_LAYOUT=layout
    )
    assert saving["error"] is None, explain(saving)
    assert saving["outputs"] == saving["again"] == reference["outputs"]
    beside = {path.name for path in source.iterdir() if path.suffix != ".safetensors"}
    assert beside <= {path.name for path in saved.iterdir()}

    spec = _spec(saved, name)
    spec.engine |= {"load_format": "sharded_state"}
    loading = run_engine(spec, way, WITH_OURS)
    assert loading["error"] is None, explain(loading)
    assert loading["outputs"] == reference["outputs"]
    assert differences(loading["snapshot"], reference["snapshot"]) == []
