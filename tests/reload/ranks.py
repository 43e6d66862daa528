"""One of two tensor-parallel ranks that take new weights at model level.

    python -m tests.reload.ranks RANK MEETING OLD NEW RESULT.json

First rank 1 alone is sent a scale that is NaN, then both are sent the new checkpoint, with
`reload_weights`. Then, in updates that come in calls, the old one: rank 1 fails, and never comes to the
end; rank 0 waits for rank 1, which comes too late; and both are on time.
"""

import json
import sys
import time
from pathlib import Path
from typing import Any


def _attempt(config: Any, model: Any, tensors: Any, phases: Any = ()) -> str | None:
    from vllm.config import set_current_vllm_config
    from vllm.model_executor.model_loader.reload import inplace

    from tests.reload.updating import update

    try:
        with set_current_vllm_config(config):
            if phases:
                update(model, iter(tensors.items()), 2, phases)
            else:
                inplace.reload_weights(config, model, iter(tensors.items()), None, True)
    except Exception as error:  # noqa: BLE001 - a failure is a result here
        return f"{type(error).__name__}: {error}"
    return None


def main() -> None:
    rank, meeting, old, new, made = int(sys.argv[1]), *sys.argv[2:]
    import torch
    from safetensors.torch import load_file
    from vllm.config import set_current_vllm_config
    from vllm.distributed import init_distributed_environment, initialize_model_parallel
    from vllm.engine.arg_utils import EngineArgs
    from vllm.model_executor.model_loader import get_model
    from vllm.plugins import load_general_plugins
    from vllm.v1.worker.cpu_model_runner import _set_torch_accelerator_to_noop

    from tests.reload.updating import PHASES
    from tests.support.model_level import COMMON
    from tests.support.snapshot import snapshot
    from vllm_sharded_state.reload import peers

    load_general_plugins()
    _set_torch_accelerator_to_noop()

    def load(path: str) -> tuple[Any, Any]:
        arguments = COMMON | {"tensor_parallel_size": 2, "kv_cache_dtype": "fp8"}
        config = EngineArgs(model=path, **arguments).create_engine_config()
        config.parallel_config.rank = rank
        with set_current_vllm_config(config):
            if not torch.distributed.is_initialized():
                init_distributed_environment(2, rank, f"file://{meeting}", rank, "gloo")
                initialize_model_parallel(2, 1)
            return config, get_model(vllm_config=config)

    _, fresh = load(new)
    result: dict[str, Any] = {"fresh": snapshot(fresh)}
    del fresh
    config, model = load(old)
    result["before"] = snapshot(model)

    def tensors(path: str, good: bool = True) -> dict[str, Any]:
        found: dict[str, Any] = {}
        for file in sorted(Path(path).glob("*.safetensors")):
            found |= load_file(file)
        if not good and rank == 1:
            name = "model.layers.1.self_attn.v_scale"
            found[name] = torch.full_like(found[name], float("nan"))
        return found

    result["error"] = _attempt(config, model, tensors(new, good=False))
    result["after"] = snapshot(model)
    result["second error"] = _attempt(config, model, tensors(new))
    result["second"] = snapshot(model)

    began = time.monotonic()
    result["update error"] = _attempt(config, model, tensors(old, good=False), PHASES)
    result["update"] = snapshot(model)
    result["seconds"] = time.monotonic() - began
    given_up = Path(f"{meeting}.given.up")
    if rank == 1:
        result["late start"] = _attempt(config, model, tensors(old), ("start", "send"))
        while not given_up.exists():
            time.sleep(0.05)
        result["late error"] = _attempt(config, model, {}, ("finish",))
    else:
        patience, peers.PATIENCE_S = peers.PATIENCE_S, 1.0
        result["late error"] = _attempt(config, model, tensors(old), PHASES)
        peers.PATIENCE_S = patience
        given_up.touch()
    result["late"] = snapshot(model)
    result["last error"] = _attempt(config, model, tensors(old), PHASES)
    result["last"] = snapshot(model)
    Path(made).write_text(json.dumps(result))


if __name__ == "__main__":
    main()
