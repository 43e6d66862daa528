"""A real engine in a process of its own takes steps in order: generate, reload, sleep, in the middle too.

python -m tests.reload.script GIVEN.json MADE.jsonl
"""

import vss_test_ways

vss_test_ways.keep_out()  # Before anything imports vLLM; spawned workers import this module too.

import dataclasses  # noqa: E402
import traceback  # noqa: E402
from collections.abc import Callable, Sequence  # noqa: E402
from concurrent.futures import ThreadPoolExecutor  # noqa: E402
from typing import Any  # noqa: E402

from tests.support.lab import WITH_OURS, without_ours  # noqa: E402
from tests.support.model_level import COMMON  # noqa: E402
from tests.support.process import run_whole, serve  # noqa: E402

#: Three whole blocks of 32 tokens and a rest, so that they are found again in the prefix cache.
PROMPTS = [
    [7 + (11 * i + 5 * i * i) % 240 for i in range(101)],
    [3 + 13 * i % 251 for i in range(99)],
]
#: Tokens that are generated, and after how many a step comes in between.
LENGTH, MIDDLE = 12, 5

#: What one step gave: `error` (type and message, or None) and `outputs` (tokens and logprobs), or either.
Made = dict[str, Any]


@dataclasses.dataclass
class Script:
    """`model` with engine arguments `engine` takes `steps`, each (name of a function here, arguments)."""

    model: str
    engine: dict[str, Any]
    steps: list[tuple[str, dict[str, Any]]]


def generate(llm: Any, prompts: Sequence[list[int]] = PROMPTS, length: int = LENGTH) -> Made:
    """Tokens and logprobs, greedy, of all prompts at once."""
    return {"outputs": _run(llm, prompts, length)}


def rpc(llm: Any, method: str = "reload_weights", **kwargs: Any) -> Made:
    """Call `method` of the workers through the engine."""
    return {"error": _error(lambda: llm.collective_rpc(method, kwargs=kwargs))}


def reset(llm: Any) -> Made:
    """Empty the prefix cache by hand."""
    assert llm.reset_prefix_cache()
    return {}


def meanwhile(llm: Any, **kwargs: Any) -> Made:
    """Reload when `MIDDLE` tokens of each prompt are there, and let the requests end."""
    made: Made = {}

    def reload() -> None:
        made["running"] = llm.llm_engine.engine_core.engine_core.scheduler.get_request_counts()[0]
        made["error"] = rpc(llm, **kwargs)["error"]

    made["outputs"] = _run(llm, PROMPTS, LENGTH, reload)
    return made


def call(llm: Any, method: str, **kwargs: Any) -> Made:
    """Call a method of `LLM` itself."""
    return {"error": _error(lambda: getattr(llm, method)(**kwargs))}


def _run(
    llm: Any, prompts: Sequence[list[int]], length: int, between: Callable[[], None] | None = None
) -> list[Any]:
    """Step the engine by hand until all is said; `between` comes after `MIDDLE` tokens."""
    from vllm import SamplingParams

    greedy = SamplingParams(
        temperature=0, max_tokens=length, logprobs=5, ignore_eos=True, detokenize=False
    )
    for number, ids in enumerate(prompts):
        llm.llm_engine.add_request(str(number), {"prompt_token_ids": ids}, greedy)
    done: dict[str, Any] = {}
    while llm.llm_engine.has_unfinished_requests():
        for output in llm.llm_engine.step():
            said = output.outputs[0]
            if between is not None and len(said.token_ids) == MIDDLE:
                between, now = None, between
                now()
            if output.finished:
                done[output.request_id] = {
                    "tokens": list(said.token_ids),
                    "logprobs": [
                        sorted((token, entry.logprob.hex()) for token, entry in step.items())
                        for step in said.logprobs
                    ],
                }
    return [done[str(number)] for number in range(len(prompts))]


def _error(work: Callable[[], Any]) -> dict[str, str] | None:
    try:
        work()
    except Exception as error:  # noqa: BLE001 - a failure is a result here
        return {"type": type(error).__name__, "message": str(error)}
    return None


def run(script: Script) -> Made:
    """Results by step, as far as it came; `error` tells why no further."""
    made: Made = {"error": None, "steps": []}
    try:
        from vllm import LLM

        llm = LLM(script.model, **(COMMON | {"max_num_seqs": 4} | script.engine))
        for name, arguments in script.steps:
            made["steps"].append(globals()[name](llm, **arguments))
    except Exception:  # noqa: BLE001 - a failure is a result here
        made["error"] = traceback.format_exc()
    return made


def run_scripts(way: str, scripts: dict[str, Script], **env: str) -> dict[str, list[Made]]:
    """The steps of each script, two processes at a time; `stock ...` runs without our plugin."""

    def one(name: str, script: Script) -> list[Made]:
        plugins = without_ours(way) if name.startswith("stock") else WITH_OURS
        (made,), log = run_whole("tests.reload.script", [script], way, plugins, 300, env)
        assert made["error"] is None, f"{name}: {made['error']}\n{log[-4000:]}"
        steps: list[Made] = made["steps"]
        return steps

    with ThreadPoolExecutor(2) as pool:
        going = {name: pool.submit(one, name, script) for name, script in scripts.items()}
        return {name: future.result() for name, future in going.items()}


if __name__ == "__main__":
    serve(lambda **fields: run(Script(**fields)))
