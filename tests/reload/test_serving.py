"""The other ways to an engine: `AsyncLLM` with worker processes, and the OpenAI server."""

import json
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from tests.reload.async_script import Plan
from tests.reload.checkpoints import updated
from tests.reload.script import LENGTH, MIDDLE, PROMPTS, Script, run_scripts
from tests.support.lab import WITH_OURS
from tests.support.model_level import environment
from tests.support.process import ROOT, run_whole
from tests.zoo.checkpoint import Checkpoint
from tests.zoo.kinds import KINDS, PACKED

pytestmark = pytest.mark.engine

KIND = KINDS["llama-kv"]
#: A core for each worker.
CORES = {"VLLM_CPU_OMP_THREADS_BIND": "0|1"}


@pytest.fixture(scope="module")
def paths(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """Checkpoints: `old`, `new`, and `part`, which lacks a tensor."""
    root = tmp_path_factory.mktemp("serving")
    old, new = KIND.build(), updated(KIND.build())
    part = {k: t for k, t in new.tensors.items() if "layers.1.mlp.up_proj" not in k}
    made = {"old": old, "new": new, "part": Checkpoint(old.config, part)}
    return {name: str(checkpoint.write(root / name)) for name, checkpoint in made.items()}


def _tokens(made: dict[str, Any]) -> list[int]:
    tokens: list[int] = made["outputs"][0]["tokens"]
    return tokens


def test_reloads_at_once_of_two_workers_while_they_generate(paths: dict[str, str]) -> None:
    """They are taken one after the other, each whole or not at all; a failing one breaks none."""
    engine = dict(KIND.engine) | {"tensor_parallel_size": 2}
    one = [("generate", {"prompts": PROMPTS[:1]})]
    plan = Plan(paths["old"], engine, [paths[n] for n in ("new", "part", "old")], paths["new"])
    (ours,), log = run_whole(
        "tests.reload.async_script", [plan], PACKED, WITH_OURS, 300,
        CORES | {"VLLM_ENABLE_V1_MULTIPROCESSING": "1"},
    )  # fmt: skip
    assert ours["error"] is None, f"{ours['error']}\n{log[-4000:]}"
    fresh = run_scripts(PACKED, {"stock new": Script(paths["new"], engine, one)}, **CORES)
    new = _tokens(fresh["stock new"][0])

    good, bad, again = ours["errors"]
    assert good is again is ours["last error"] is None
    assert "model.layers.1.mlp.up_proj.weight" in bad
    assert ours["running"][:MIDDLE] == ours["old"][:MIDDLE]
    assert len(ours["running"]) == LENGTH
    assert ours["after"] == ours["old"] != new
    assert ours["last"] == new


@contextmanager
def _server(model: str, log: Path) -> Iterator[str]:
    """The address of a server of `model` on this machine."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    command = [
        *(sys.executable, "-m", "vllm.entrypoints.openai.api_server", "--model", model),
        *("--host", "127.0.0.1", "--port", str(port), "--kv-cache-dtype", "fp8"),
        *("--max-model-len", "128", "--block-size", "32", "--enforce-eager"),
        *("--skip-tokenizer-init", "--tokens-only"),
    ]
    env = environment(PACKED, WITH_OURS) | {
        "VLLM_ENABLE_V1_MULTIPROCESSING": "1",
        "VLLM_SERVER_DEV_MODE": "1",
    }
    with log.open("w") as output:
        process = subprocess.Popen(command, cwd=ROOT, env=env, stdout=output, stderr=output)
        try:
            address, began = f"http://127.0.0.1:{port}", time.monotonic()
            while _status(address) != 200:
                assert process.poll() is None, log.read_text()
                assert time.monotonic() - began < 180, log.read_text()
                time.sleep(0.5)
            yield address
        finally:
            process.terminate()
            process.wait(60)


def _status(address: str) -> int | None:
    try:
        with urllib.request.urlopen(f"{address}/health", timeout=5) as answer:
            status: int = answer.status
            return status
    except OSError:
        return None


def _post(address: str, **body: Any) -> tuple[int, Any]:
    request = urllib.request.Request(
        address, json.dumps(body).encode(), {"Content-Type": "application/json"}
    )
    try:
        with urllib.request.urlopen(request, timeout=120) as answer:
            return answer.status, json.load(answer)
    except urllib.error.HTTPError as error:
        return error.code, error.read().decode()


def test_the_server(paths: dict[str, str], tmp_path: Path) -> None:
    def generate(address: str) -> list[int]:
        status, answer = _post(
            f"{address}/inference/v1/generate",
            token_ids=PROMPTS[0],
            sampling_params={"temperature": 0, "max_tokens": LENGTH, "ignore_eos": True},
        )
        assert status == 200, answer
        tokens: list[int] = answer["choices"][0]["token_ids"]
        return tokens

    def reload(address: str, **kwargs: str) -> tuple[int, Any]:
        return _post(f"{address}/collective_rpc", method="reload_weights", kwargs=kwargs)

    one = [("generate", {"prompts": PROMPTS[:1]})]
    with ThreadPoolExecutor(1) as pool:
        engine = dict(KIND.engine)
        scripts = {f"stock {n}": Script(paths[n], engine, one) for n in ("old", "new")}
        fresh = pool.submit(run_scripts, PACKED, scripts)
        with _server(paths["old"], tmp_path / "server.log") as address:
            before = generate(address)
            part = reload(address, weights_path=paths["part"])
            between = generate(address)
            odd = reload(address, weights_path=paths["new"], kv_cache="kept")
            new = reload(address, weights_path=paths["new"], kv_cache="clear")
            after = generate(address)
        old_fresh, new_fresh = (_tokens(fresh.result()[f"stock {n}"][0]) for n in ("old", "new"))
    assert before == between == old_fresh != new_fresh
    assert part[0] == odd[0] == 500
    assert new[0] == 200, new[1]
    assert len(new[1]["results"]) == 1
    assert after == new_fresh
    log = (tmp_path / "server.log").read_text()
    assert "model.layers.1.mlp.up_proj.weight" in log
    assert "kv_cache='kept'" in log
