"""One of two tensor-parallel ranks that take new weights at model level.

    python -m tests.reload.ranks RANK MEETING OLD NEW RESULT.json

First rank 1 alone is sent a scale that is NaN, then both are sent the new checkpoint, with digests.
"""

import json
import sys
from pathlib import Path
from typing import Any


def _attempt(config: Any, model: Any, tensors: dict[str, Any]) -> Any:
    """The error; or what is reported."""
    from vllm.config import set_current_vllm_config
    from vllm.model_executor.model_loader.reload import inplace

    from vllm_sharded_state.reload import call

    try:
        with call.made(digest=True) as made, set_current_vllm_config(config):
            inplace.reload_weights(config, model, iter(tensors.items()), None, True)
    except Exception as error:  # noqa: BLE001 - a failure is a result here
        return f"{type(error).__name__}: {error}"
    return made.report


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

    from tests.support.model_level import COMMON
    from tests.support.snapshot import snapshot
    from vllm_sharded_state.state.digest import state_digest

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

    config, fresh = load(new)
    result: dict[str, Any] = {"fresh": snapshot(fresh), "digest": state_digest(fresh, config)}
    del fresh
    config, model = load(old)
    result["before"] = snapshot(model)
    tensors: dict[str, Any] = {}
    for file in sorted(Path(new).glob("*.safetensors")):
        tensors |= load_file(file)
    bad = dict(tensors)
    if rank == 1:
        name = "model.layers.1.self_attn.v_scale"
        bad[name] = torch.full_like(bad[name], float("nan"))
    result["error"] = _attempt(config, model, bad)
    result["after"] = snapshot(model)
    result["report"] = _attempt(config, model, tensors)
    result["second"] = snapshot(model)
    Path(made).write_text(json.dumps(result))


if __name__ == "__main__":
    main()
