"""Print the directory of a real model, building it first where it is missing: `models.py NAME`.

| name | what |
|---|---|
| `gemma` | Gemma 3 270M, bf16 |
| `gemma-kv` | the same, FP8 KV cache with one scale per tensor |
| `gemma-kv-head` | the same, FP8 KV cache with one scale per head |
| `gemma-w8a8-kv` | int8 weights and activations, FP8 KV cache with one scale per tensor |

Models lie in `.cache/models`, or where `VSS_MODEL_CACHE` says. A model is built again when the
program that builds it has changed. Needs only Python; the work is done in the quantize environment.
"""

import argparse
import os
import shutil
import subprocess
import sys
from pathlib import Path

import environment

TOOLS = environment.ROOT / "tools"
PREPARE = TOOLS / "prepare_gemma.py"
QUANTIZE = TOOLS / "quantize.py"

#: Name -> scheme of `quantize.py`; None is the model as it comes.
MODELS = {"gemma": None, "gemma-kv": "kv", "gemma-kv-head": "kv-head", "gemma-w8a8-kv": "w8a8-kv"}
BASE = "gemma"


def cache() -> Path:
    """Return the directory that models are kept in."""
    return Path(os.environ.get("VSS_MODEL_CACHE") or environment.ROOT / ".cache" / "models")


def ensure(name: str) -> Path:
    """Return the directory of the model `name`, complete and built by the present program.

    Raises:
        RuntimeError: building failed; the message holds the end of the log and where the rest is.
    """
    with environment.locked(cache() / ".lock"):
        return _ensure(name)


def _ensure(name: str) -> Path:
    scheme = MODELS[name]
    recipe = _recipe(name)
    out, stamp = cache() / name, cache() / f"{name}.sha256"
    if out.is_dir() and stamp.exists() and stamp.read_text() == recipe:
        return out
    arguments = [str(PREPARE)] if scheme is None else [str(QUANTIZE), scheme, str(_ensure(BASE))]
    _build(name, arguments, out)
    stamp.write_text(recipe)
    return out


def _recipe(name: str) -> str:
    """Return a digest of all that decides the bytes of the model."""
    packages = environment.REQUIREMENTS / "quantize.txt"
    if MODELS[name] is None:
        return environment.digest(PREPARE, packages)
    return environment.digest(_recipe(BASE), QUANTIZE, packages)


def _build(name: str, arguments: list[str], out: Path) -> None:
    """Build into a directory of another name, renamed when it is complete."""
    python = environment.ensure("quantize")
    print(f"{name}: building it (about a minute)", file=sys.stderr, flush=True)
    unfinished, log = out.with_name(f"{name}.unfinished"), out.with_name(f"{name}.log")
    shutil.rmtree(unfinished, ignore_errors=True)
    with log.open("w") as output:
        # Nothing here may come from a hub: what is built has to be the same everywhere.
        done = subprocess.run(
            [str(python), *arguments, str(unfinished)],
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=subprocess.STDOUT,
            env={**os.environ, "HF_HUB_OFFLINE": "1"},
        )
    if done.returncode:
        end = "\n".join(log.read_text(errors="replace").splitlines()[-20:])
        raise RuntimeError(f"building {name} failed (exit {done.returncode}), see {log}:\n{end}")
    shutil.rmtree(out, ignore_errors=True)
    unfinished.rename(out)


def main() -> int:
    """Print the directory of the model that the command line names."""
    parser = argparse.ArgumentParser(description="Print a model's directory, building it first.")
    parser.add_argument("name", choices=sorted(MODELS))
    try:
        print(ensure(parser.parse_args().name))
    except (FileNotFoundError, RuntimeError, subprocess.CalledProcessError) as error:
        print(error, file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
