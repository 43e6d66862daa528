"""An `AsyncLLM` in a process of its own: reloads side by side, while it generates.

python -m tests.reload.async_script GIVEN.json MADE.jsonl
"""

import vss_test_ways

vss_test_ways.keep_out()  # Before anything imports vLLM; spawned workers import this module too.

import asyncio  # noqa: E402
import dataclasses  # noqa: E402
import traceback  # noqa: E402
from typing import Any  # noqa: E402

from tests.reload.script import LENGTH, MIDDLE, PROMPTS, Made  # noqa: E402
from tests.support.model_level import COMMON  # noqa: E402
from tests.support.process import serve  # noqa: E402


@dataclasses.dataclass
class Plan:
    """Start `old` with `engine`; reload each of `paths` at once while it generates, then `last`."""

    old: str
    engine: dict[str, Any]
    paths: list[str]
    last: str


async def _generate(llm: Any, name: str, begun: asyncio.Event | None = None) -> list[int]:
    """Tokens of the first prompt; `begun` is set when `MIDDLE` of them are there."""
    from vllm import SamplingParams

    greedy = SamplingParams(temperature=0, max_tokens=LENGTH, ignore_eos=True, detokenize=False)
    tokens: list[int] = []
    async for output in llm.generate({"prompt_token_ids": PROMPTS[0]}, greedy, name):
        tokens = list(output.outputs[0].token_ids)
        if begun is not None and len(tokens) >= MIDDLE:
            begun.set()
    return tokens


async def _reload(llm: Any, path: str) -> str | None:
    try:
        await llm.collective_rpc("reload_weights", kwargs={"weights_path": path})
    except Exception as error:  # noqa: BLE001 - a failure is a result here
        return str(error)
    return None


async def _run(plan: Plan) -> Made:
    from vllm.engine.arg_utils import AsyncEngineArgs
    from vllm.v1.engine.async_llm import AsyncLLM

    arguments = COMMON | {"max_num_seqs": 4} | plan.engine
    llm = AsyncLLM.from_engine_args(AsyncEngineArgs(model=plan.old, **arguments))
    try:
        made: Made = {"old": await _generate(llm, "old")}
        begun = asyncio.Event()
        running = asyncio.create_task(_generate(llm, "running", begun))
        await begun.wait()
        made["errors"] = await asyncio.gather(*(_reload(llm, path) for path in plan.paths))
        made["running"] = await running
        made["after"] = await _generate(llm, "after")
        made["last error"] = await _reload(llm, plan.last)
        made["last"] = await _generate(llm, "last")
        return made
    finally:
        llm.shutdown()


def run(plan: Plan) -> Made:
    """What `_run` makes, or why it did not."""
    try:
        return {"error": None} | asyncio.run(_run(plan))
    except Exception:  # noqa: BLE001 - a failure is a result here
        return {"error": traceback.format_exc()}


if __name__ == "__main__":
    serve(lambda **fields: run(Plan(**fields)))
