"""One of two tensor-parallel ranks that take new weights at model level.

    python -m tests.reload.ranks RANK MEETING OLD NEW ENGINE BAD RESULT.json

ENGINE holds engine arguments in JSON. First rank 1 alone is sent the tensor BAD in a form that can't be
taken: a scale that is NaN, a weight of one element. Then both are sent the new checkpoint, with digests.
Then, in updates that come in calls, the old one: rank 1 fails, and never comes to the end; rank 0 waits
for rank 1, which comes too late; and both are on time. At last, from the new one again, they are given
what they saved of the old one: with a damaged part of rank 1, and as it is.
"""

import json
import sys
import time
from pathlib import Path
from typing import Any


def _attempt(
    config: Any, model: Any, tensors: Any, path: Path | None = None, phases: Any = ()
) -> Any:
    """The error; or what is reported, where the update comes to its end."""
    from vllm.config import set_current_vllm_config
    from vllm.model_executor.model_loader.reload import inplace

    from tests.reload.updating import update
    from vllm_sharded_state.reload import call

    weights = None if tensors is None else iter(tensors.items())
    try:
        with call.made(digest=True) as made, set_current_vllm_config(config):
            if phases:
                update(model, weights, 2, phases)
            else:
                inplace.reload_weights(config, model, weights, path and str(path), True)
    except Exception as error:  # noqa: BLE001 - a failure is a result here
        return f"{type(error).__name__}: {error}"
    return made.report


def main() -> None:
    rank, meeting, old, new, engine, bad_name, made = int(sys.argv[1]), *sys.argv[2:]
    import torch
    from safetensors.torch import load_file
    from vllm.config import set_current_vllm_config
    from vllm.distributed import init_distributed_environment, initialize_model_parallel
    from vllm.engine.arg_utils import EngineArgs
    from vllm.model_executor.model_loader import ShardedStateLoader, get_model
    from vllm.plugins import load_general_plugins
    from vllm.v1.worker.cpu_model_runner import _set_torch_accelerator_to_noop

    from tests.reload.spoils import flip
    from tests.reload.updating import PHASES
    from tests.support import edit
    from tests.support import snapshot as look
    from tests.support.model_level import COMMON
    from vllm_sharded_state.reload import peers
    from vllm_sharded_state.state.digest import state_digest

    with_experts = "enable_expert_parallel" in engine

    def snapshot(model: Any) -> dict[str, Any]:
        # The CPU's kernel of a mixture of experts reads past its memory where there is an expert map.
        return look.snapshot(model, kernels=not with_experts)

    load_general_plugins()
    _set_torch_accelerator_to_noop()

    def load(path: str) -> tuple[Any, Any]:
        arguments = COMMON | {"tensor_parallel_size": 2} | json.loads(engine)
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

    def tensors(path: str, good: bool = True) -> dict[str, Any]:
        found: dict[str, Any] = {}
        for file in sorted(Path(path).glob("*.safetensors")):
            found |= load_file(file)
        if not good and rank == 1:
            tensor, is_scale = found[bad_name], bad_name.endswith("_scale")
            found[bad_name] = (
                torch.full_like(tensor, torch.nan) if is_scale else tensor.view(-1)[:1]
            )
        return found

    saved, damaged = Path(meeting).parent / "saved", Path(meeting).parent / "damaged"
    if not with_experts:
        saved.mkdir(exist_ok=True)
        ShardedStateLoader.save_model(model, str(saved))
        if rank == 0:
            flip(edit.copy(saved, damaged), rank=1)
        torch.distributed.barrier()
    result["error"] = _attempt(config, model, tensors(new, good=False))
    result["after"] = snapshot(model)
    result["report"] = _attempt(config, model, tensors(new))
    result["second"] = snapshot(model)

    began = time.monotonic()
    result["update error"] = _attempt(config, model, tensors(old, good=False), phases=PHASES)
    result["update"] = snapshot(model)
    result["seconds"] = time.monotonic() - began
    given_up = Path(f"{meeting}.given.up")
    if rank == 1:
        result["late start"] = _attempt(config, model, tensors(old), phases=("start", "send"))
        while not given_up.exists():
            time.sleep(0.05)
        result["late error"] = _attempt(config, model, {}, phases=("finish",))
    else:
        patience, peers.PATIENCE_S = peers.PATIENCE_S, 1.0
        result["late error"] = _attempt(config, model, tensors(old), phases=PHASES)
        peers.PATIENCE_S = patience
        given_up.touch()
    result["late"] = snapshot(model)
    result["last report"] = _attempt(config, model, tensors(old), phases=PHASES)
    result["last"] = snapshot(model)

    if not with_experts:
        _attempt(config, model, tensors(new))
        result["damaged error"] = _attempt(config, model, None, damaged)
        result["damaged"] = snapshot(model)
        result["saved report"] = _attempt(config, model, None, saved)
        result["saved"] = snapshot(model)
    Path(made).write_text(json.dumps(result))


if __name__ == "__main__":
    main()
