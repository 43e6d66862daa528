"""One of two ranks: load the original and save it, then load what was saved from the hub.

    python -m tests.remote.two_ranks '{"rank": 0, "world": …, "source": …, "save": …, …}'

Writes the digests of all that either model holds.
"""

import vss_test_ways

vss_test_ways.keep_out()  # Before anything imports vLLM.

import json  # noqa: E402
import sys  # noqa: E402
from pathlib import Path  # noqa: E402
from typing import Any  # noqa: E402

from tests.support.model_level import COMMON  # noqa: E402


def load(model: str, **engine: Any) -> Any:
    from vllm.config import set_current_vllm_config
    from vllm.engine.arg_utils import EngineArgs
    from vllm.model_executor.model_loader import get_model

    arguments = COMMON | {"kv_cache_dtype": "fp8", "tensor_parallel_size": 2} | engine
    config = EngineArgs(model=model, **arguments).create_engine_config()
    with set_current_vllm_config(config):
        return get_model(vllm_config=config)


def main() -> None:
    from torch import distributed
    from vllm.config import VllmConfig, set_current_vllm_config
    from vllm.distributed import init_distributed_environment, initialize_model_parallel
    from vllm.model_executor.model_loader import ShardedStateLoader
    from vllm.v1.worker.cpu_model_runner import _set_torch_accelerator_to_noop

    from tests.support.snapshot import snapshot

    job = json.loads(sys.argv[1])
    with set_current_vllm_config(VllmConfig()):
        world = f"file://{job['world']}"
        init_distributed_environment(2, job["rank"], world, job["rank"], "gloo")
        initialize_model_parallel(2, 1)
    _set_torch_accelerator_to_noop()
    model = load(job["source"])
    saved = snapshot(model, kernels=False)
    Path(job["save"]).mkdir(exist_ok=True)
    ShardedStateLoader.save_model(model, job["save"])
    del model
    distributed.barrier()
    loaded = snapshot(load(job["repo"], load_format="sharded_state"), kernels=False)
    Path(job["result"]).write_text(json.dumps({"saved": saved, "loaded": loaded}))
    distributed.barrier()


if __name__ == "__main__":
    main()
