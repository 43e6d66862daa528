"""Start a real engine in a process of its own: generate, look, save. One engine a process.

    python -m tests.support.engine SPEC.json RESULT.json

Tokens are exact integers and logprobs `float.hex`, so that two results compare bit for bit.
"""

import vss_test_ways

vss_test_ways.keep_out()  # Before anything imports vLLM; spawned workers import this module too.

import dataclasses  # noqa: E402
import os  # noqa: E402
import time  # noqa: E402
import traceback  # noqa: E402
from pathlib import Path  # noqa: E402
from typing import Any  # noqa: E402

from tests.support.batch import check_way  # noqa: E402
from tests.support.model_level import COMMON  # noqa: E402
from tests.support.places import moved, places  # noqa: E402
from tests.support.process import run_whole, serve  # noqa: E402

#: Token ids below every vocabulary of the zoo. Two lengths that share no prefix.
PROMPTS = [[1, 5, 17, 200, 33, 9, 121], [7, 3, 99, 14, 14, 60, 181, 245, 2, 77, 31, 8, 19, 54]]


@dataclasses.dataclass
class Spec:
    """What one engine does, in this order: mutate, generate (or embed), snapshot, save, again, reload.

    `reload` lists checkpoints (None: the engine's own), or arguments of `reload_weights`; after each the
    prefix cache is emptied, the same is generated again, and tensors that lie elsewhere then are listed.
    `digest`: at last, the digest of each rank. `adapter` is a LoRA adapter to generate with; with `draft`
    the draft model is looked at in the end.
    """

    model: str
    engine: dict[str, Any] = dataclasses.field(default_factory=dict)
    prompts: list[list[int]] = dataclasses.field(default_factory=lambda: PROMPTS)
    max_tokens: int = 12
    pooling: bool = False
    mutate: str | None = None
    snapshot: bool = False
    save: str | None = None
    pattern: str | None = None
    max_size: int | None = None
    again: bool = False
    reload: list[Any] = dataclasses.field(default_factory=list)
    digest: bool = False
    adapter: str | None = None
    draft: bool = False


def outputs(llm: Any, spec: Spec) -> Any:
    prompts = [{"prompt_token_ids": ids} for ids in spec.prompts]
    if spec.pooling:
        return [[x.hex() for x in out.outputs.embedding] for out in llm.embed(prompts)]
    from vllm import SamplingParams

    greedy = SamplingParams(
        temperature=0, max_tokens=spec.max_tokens, logprobs=5, ignore_eos=True, detokenize=False
    )
    return [
        {
            "tokens": list(done.outputs[0].token_ids),
            "logprobs": [
                sorted((token, entry.logprob.hex()) for token, entry in step.items())
                for step in done.outputs[0].logprobs
            ],
        }
        for done in llm.generate(prompts, greedy, use_tqdm=False, lora_request=_adapter(spec))
    ]


def _adapter(spec: Spec) -> Any:
    if spec.adapter is None:
        return None
    from vllm.lora.request import LoRARequest

    return LoRARequest("adapter", 1, spec.adapter)


def _reload(llm: Any, given: Any, spec: Spec) -> dict[str, Any]:
    error = report = None
    kwargs = given if isinstance(given, dict) else {"weights_path": given}
    before = _places(llm)
    try:
        report = llm.collective_rpc("reload_weights", kwargs=kwargs)
    except Exception as caught:  # noqa: BLE001 - every failure is a result here
        error = {"type": type(caught).__name__, "message": str(caught)}
        del caught
    llm.reset_prefix_cache()
    said = outputs(llm, spec)
    return {"error": error, "report": report, "outputs": said, "moved": moved(before, _places(llm))}


def _places(llm: Any) -> dict[str, Any]:
    """Where the tensors lie, in an engine that may be sent a function to look."""
    if os.environ["VLLM_ALLOW_INSECURE_SERIALIZATION"] != "1":
        return {}
    found: dict[str, Any] = llm.apply_model(places)[0]
    return found


def _snapshot(model: Any) -> dict[str, Any]:
    from tests.support.snapshot import snapshot

    check_way(model)
    return snapshot(model)


def _draft(worker: Any) -> dict[str, Any]:
    from tests.support.snapshot import snapshot

    return snapshot(worker.model_runner.drafter.model)


def _mutate(name: str) -> Any:
    from tests.zoo.mutations import MUTATIONS

    return MUTATIONS[name]


def run(spec: Spec) -> dict[str, Any]:
    """Do what `spec` says. An error is returned with its type and message."""
    result: dict[str, Any] = {"error": None}
    try:
        from vllm import LLM

        began = time.perf_counter()
        more: dict[str, Any] = {"runner": "pooling"} if spec.pooling else {}
        llm = LLM(spec.model, **(COMMON | {"max_num_seqs": 4} | more | spec.engine))
        result["start_s"] = round(time.perf_counter() - began, 2)
        if spec.mutate:
            llm.apply_model(_mutate(spec.mutate))
        result["outputs"] = outputs(llm, spec)
        if spec.snapshot:
            (result["snapshot"],) = llm.apply_model(_snapshot)
        if spec.save:
            Path(spec.save).mkdir(parents=True, exist_ok=True)
            began = time.perf_counter()
            llm.llm_engine.engine_core.save_sharded_state(
                path=spec.save, pattern=spec.pattern, max_size=spec.max_size
            )
            result["save_s"] = round(time.perf_counter() - began, 2)
        if spec.again:
            result["again"] = outputs(llm, spec)
        result["reloads"] = [_reload(llm, given, spec) for given in spec.reload]
        if spec.digest:
            rpc = "compute_weight_checksums"
            result["digest"] = llm.collective_rpc(rpc, kwargs={"state": True})
        if spec.draft:
            (result["draft"],) = llm.collective_rpc(_draft)
    except Exception as error:  # noqa: BLE001 - every failure is a result here
        result["error"] = {
            "type": type(error).__name__,
            "message": str(error),
            "traceback": traceback.format_exc(),
        }
    return result


def run_engine(
    spec: Spec, way: str, plugins: str, timeout: float = 600, **env: str
) -> dict[str, Any]:
    """Run `spec` in a new process; `log` of the result is what the process printed."""
    (result,), log = run_whole("tests.support.engine", [spec], way, plugins, timeout, env)
    return result | {"log": log}


if __name__ == "__main__":
    serve(lambda **fields: run(Spec(**fields)))
