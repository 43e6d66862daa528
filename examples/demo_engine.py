"""One engine of the demo, in a process of its own: generate from a sentence, and save on request.

`demo.py` runs this twice with the package and once without; it tells it what to do as JSON on the
command line and reads the answer from the file named there.
"""

import json
import os
import sys
import time
from pathlib import Path
from typing import Any

from torch import nn
from vllm import LLM, SamplingParams

MAX_TOKENS = 32
LOGPROBS = 5


def kv_scales(model: nn.Module) -> dict[str, float]:
    """Return every KV scale that kernels read, by name: buffers and the floats that mirror them."""
    found = {}
    for name, module in model.named_modules():
        for kind in ("k", "v"):
            buffer = getattr(module, f"_{kind}_scale", None)
            if buffer is not None:
                found[f"{name}._{kind}_scale"] = buffer.float().max().item()
                found[f"{name}._{kind}_scale_float"] = getattr(module, f"_{kind}_scale_float")
    return found


def run(task: dict[str, Any]) -> dict[str, Any]:
    """Start the engine that `task` describes; returns text, tokens, logprobs, scales, seconds."""
    # By its module's name, not as part of `__main__`, which is another program in the worker.
    from demo_engine import kv_scales

    started = time.perf_counter()
    llm = LLM(
        task["model"],
        load_format=task["load_format"],
        kv_cache_dtype=task["kv_cache_dtype"],
        block_size=32,  # the CPU's FP8 KV cache takes multiples of 32
        max_model_len=512,
        enforce_eager=True,
    )
    ready = time.perf_counter()
    sampling = SamplingParams(temperature=0.0, max_tokens=MAX_TOKENS, logprobs=LOGPROBS)
    output = llm.generate([task["prompt"]], sampling, use_tqdm=False)[0].outputs[0]
    generated = time.perf_counter()
    result = {
        "text": output.text,
        "tokens": list(output.token_ids),
        # JSON writes a float so that it reads back as the same one: equal here is bit for bit.
        "logprobs": [
            {str(token): entry.logprob for token, entry in position.items()}
            for position in output.logprobs or []
        ],
        "scales": llm.apply_model(kv_scales)[0],
        "seconds": {"start": ready - started, "generate": generated - ready},
    }
    if task.get("save_to"):
        began = time.perf_counter()
        llm.llm_engine.engine_core.save_sharded_state(path=task["save_to"])
        result["seconds"]["save"] = time.perf_counter() - began
    return result


def main() -> None:
    """Do the task in the first argument and write the result to the file in the second."""
    # `apply_model` sends a function to the worker, which vLLM allows on request only.
    os.environ["VLLM_ALLOW_INSECURE_SERIALIZATION"] = "1"
    os.environ.setdefault("VLLM_CPU_KVCACHE_SPACE", "1")
    result = run(json.loads(sys.argv[1]))
    Path(sys.argv[2]).write_text(json.dumps(result))


if __name__ == "__main__":
    main()
