"""Load a model in this process without an engine: seconds a model, one rank, no KV cache."""

import gc
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from torch import nn

COMMON: dict[str, Any] = {
    "dtype": "bfloat16",
    "max_model_len": 128,
    "block_size": 32,
    "enforce_eager": True,
    "skip_tokenizer_init": True,
    "seed": 0,
}


def environment(way: str, plugins: str) -> dict[str, str]:
    """Environment of a process that runs in `way` with the general plugins `plugins`, and no other."""
    return {
        **{
            k: v
            for k, v in os.environ.items()
            if not k.startswith(("VLLM_", "VSS_")) or k == "VLLM_TARGET_DEVICE"
        },
        "VSS_TEST_WAY": way,
        "VLLM_PLUGINS": plugins,
        "VLLM_CPU_KVCACHE_SPACE": "1",
        "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
        "VLLM_ALLOW_INSECURE_SERIALIZATION": "1",
        "VLLM_NO_USAGE_STATS": "1",
        "VLLM_LOGGING_LEVEL": os.environ.get("VLLM_LOGGING_LEVEL", "WARNING"),
        "HF_HUB_OFFLINE": "1",
        "OMP_NUM_THREADS": "1",
        "TOKENIZERS_PARALLELISM": "false",
    }


_started = False


def _start() -> None:
    """One gloo world for the whole process: of one rank, or as `VSS_TEST_WORLD` has it.

    That is `RANK/SIZE/PATH` of tensor parallel ranks that meet at a file.
    """
    global _started
    if _started:
        return
    import tempfile

    from vllm.config import VllmConfig, set_current_vllm_config
    from vllm.distributed import init_distributed_environment, initialize_model_parallel
    from vllm.v1.worker.cpu_model_runner import _set_torch_accelerator_to_noop

    world = os.environ.get("VSS_TEST_WORLD") or f"0/1/{tempfile.mkdtemp()}/world"
    rank, size, meeting = world.split("/", 2)
    with set_current_vllm_config(VllmConfig()):
        init_distributed_environment(int(size), int(rank), f"file:///{meeting}", int(rank), "gloo")
        initialize_model_parallel(int(size), 1)
    _set_torch_accelerator_to_noop()
    _started = True


@contextmanager
def loaded(path: Path | str, engine: dict[str, Any]) -> Iterator[nn.Module]:
    """The model at `path` (or a hub id, or an address), loaded with engine arguments `engine`.

    It is freed when the block ends.
    """
    with configured(path, engine) as (model, config):
        try:
            yield model
        finally:
            del model, config  # else they would outlive the collection there


@contextmanager
def configured(path: Path | str, engine: dict[str, Any]) -> Iterator[tuple[nn.Module, Any]]:
    """The model of `loaded`, and the configuration that it was built from."""
    from vllm.config import set_current_vllm_config
    from vllm.engine.arg_utils import EngineArgs
    from vllm.model_executor.model_loader import get_model

    config = EngineArgs(model=str(path), **(COMMON | engine)).create_engine_config()
    _start()
    # As Worker.load_model does. Saving, there too, runs without a current config.
    with set_current_vllm_config(config):
        model = get_model(vllm_config=config)
        if config.lora_config is not None:
            model = _with_lora(model, config)
    try:
        yield model, config
    finally:
        del model, config
        gc.collect()


def _with_lora(model: nn.Module, config: Any) -> nn.Module:
    """As LoRAModelRunnerMixin.load_lora_model does: wrap the layers that an adapter can change."""
    import torch
    from vllm.lora.worker_manager import LRUCacheWorkerLoRAManager

    manager = LRUCacheWorkerLoRAManager(config, torch.device("cpu"), model.embedding_modules)
    wrapped: nn.Module = manager.create_lora_manager(model, config)
    return wrapped
