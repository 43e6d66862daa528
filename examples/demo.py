"""Save a real quantized model from one vLLM process, start another from it, and compare.

    make demo

Gemma 3 270M, its KV cache quantized by llm-compressor, in three processes: stock vLLM on the
original checkpoint, as the reference; vLLM with this package, which generates and saves; and a new
one that starts from the saved state. Exits with 1 when anything differs.
"""

import argparse
import json
import os
import re
import shutil
import subprocess
import sys
import time
from collections import Counter
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
CACHE = ROOT / ".cache" / "demo"
MODELS = ("gemma", "gemma-kv", "gemma-kv-head", "gemma-w8a8-kv")
MB = 1_000_000
ERROR = re.compile(r"[\w.]*(Error|Exception): .*")

# vLLM loads every plugin it finds. Named here, so that no other one has a part in the comparison.
STOCK = {"VLLM_PLUGINS": ""}
OURS = {"VLLM_PLUGINS": "sharded_state"}


class Failed(Exception):
    """A step did not run to its end."""


def prepare(name: str) -> Path:
    """Return the model's directory; its first call builds it."""
    # Progress goes to stderr, so that a person sees what a first run is waiting for.
    command = [sys.executable, str(ROOT / "tools" / "models.py"), name]
    done = subprocess.run(command, stdout=subprocess.PIPE, text=True)
    if done.returncode:
        raise Failed(f"{name} could not be prepared")
    return Path(done.stdout.strip())


def engine(name: str, task: dict[str, Any], **variables: str) -> dict[str, Any]:
    """Run `demo_engine.py` on `task` in a new process, with `variables` in its environment."""
    log, answer = CACHE / f"{name}.log", CACHE / f"{name}.json"
    answer.unlink(missing_ok=True)
    command = [sys.executable, str(ROOT / "examples" / "demo_engine.py"), json.dumps(task)]
    with log.open("w") as output:
        done = subprocess.run(
            [*command, str(answer)],
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=subprocess.STDOUT,
            env={**os.environ, "HF_HUB_OFFLINE": "1", **variables},
        )
    if done.returncode or not answer.exists():
        raise Failed(f"{name}: exit {done.returncode}, see {log}\n{causes(log)}")
    result: dict[str, Any] = json.loads(answer.read_text())
    return result


def causes(log: Path) -> str:
    """Return the errors that a log names, each once, without vLLM's prefix; else the log's end."""
    lines = log.read_text(errors="replace").splitlines()
    named = [line[found.start() :] for line in lines if (found := ERROR.search(line))]
    return "\n".join(f"  {line}" for line in dict.fromkeys(named) or lines[-20:])


def size(directory: Path) -> str:
    """Return the sizes of a model's directory: weights, and all else."""
    files = [path for path in directory.rglob("*") if path.is_file()]
    weights = [path.stat().st_size for path in files if path.suffix == ".safetensors"]
    rest = sum(path.stat().st_size for path in files) - sum(weights)
    return f"{sum(weights) / MB:.1f} MB in {len(weights)} safetensors, {rest / MB:.1f} MB beside"


def span(scales: dict[str, float], kind: str) -> str:
    """Return count, smallest and largest of the scales of `kind`."""
    values = [value for name, value in scales.items() if name.endswith(f"._{kind}_scale")]
    return f"{len(values)} {kind} scales from {min(values):.6f} to {max(values):.6f}"


def layouts(directory: Path) -> str:
    """Return how many modules the manifest holds in each layout."""
    manifest = json.loads((directory / "sharded_state.json").read_text())
    counts = Counter(
        unit["layout"] for rank in manifest["ranks"] for unit in rank["units"].values()
    )
    return ", ".join(f"{count} modules in {name} layout" for name, count in sorted(counts.items()))


def differences(name: str, left: dict[str, Any], right: dict[str, Any]) -> int:
    """Print whether each kind of result is the same on both sides; returns how many are not."""
    wrong = 0
    for kind, what in (
        ("tokens", f"{len(left['tokens'])} tokens"),
        ("logprobs", f"{sum(map(len, left['logprobs']))} logprobs, bit for bit"),
        ("scales", f"{len(left['scales'])} KV scales and their host mirrors"),
    ):
        same = left[kind] == right[kind]
        wrong += not same
        print(f"  {name:<34} {what:<42} {'identical' if same else 'DIFFERENT'}")
    return wrong


def demo(model_name: str, prompt: str) -> int:
    """Run all steps; returns the exit status."""

    def step(number: int, title: str, began: float, detail: str) -> None:
        print(
            f"  {number}  {title:<46} {time.perf_counter() - began:6.1f} s   {detail}", flush=True
        )

    def parts(result: dict[str, Any]) -> str:
        return ", ".join(f"{name} {value:.1f}" for name, value in result["seconds"].items())

    CACHE.mkdir(parents=True, exist_ok=True)
    began = time.perf_counter()
    source = prepare(model_name)
    print(f"\n{model_name}, continuing {prompt!r}\n")
    step(1, "prepare the model", began, size(source))

    quantized = "kv_cache_scheme" in (source / "config.json").read_text()
    task = {
        "model": str(source),
        "load_format": "auto",
        "kv_cache_dtype": "fp8" if quantized else "auto",
        "prompt": prompt,
    }
    began = time.perf_counter()
    reference = engine("reference", task, **STOCK)
    step(2, "reference: stock vLLM, original checkpoint", began, parts(reference))

    saved = CACHE / "saved"
    shutil.rmtree(saved, ignore_errors=True)
    began = time.perf_counter()
    before = engine("before", {**task, "save_to": str(saved)}, **OURS)
    step(3, "before: vLLM with this package, then save", began, parts(before))

    began = time.perf_counter()
    loading = {**task, "model": str(saved), "load_format": "sharded_state"}
    after = engine("after", loading, **OURS)
    step(4, "after: a new process, from the saved state", began, parts(after))

    print(f"\n  saved    {size(saved)}\n           {layouts(saved)}\n")
    for name, result in (("reference", reference), ("before", before), ("after", after)):
        print(f"  {name:<9} {span(result['scales'], 'k')}, {span(result['scales'], 'v')}")
    print()
    for name, result in (("reference", reference), ("before", before), ("after", after)):
        print(f"  {name:<9} {prompt + result['text']!r}")
    print()
    wrong = differences("before save / after load", before, after)
    wrong += differences("reference / after load", reference, after)
    return 1 if wrong else 0


def main() -> int:
    """Run the demo by the command line."""
    parser = argparse.ArgumentParser(description="Save a real model, start from it, compare.")
    parser.add_argument("--model", choices=MODELS, default="gemma-kv")
    parser.add_argument("--prompt", default="The old lighthouse at the edge of the bay")
    args = parser.parse_args()
    try:
        return demo(args.model, args.prompt)
    except Failed as error:
        print(error, file=sys.stderr)
        return 1


if __name__ == "__main__":
    sys.exit(main())
