"""What a checkpoint is bound to: the model, the layout of ranks, and for runtime layout the machine."""

from typing import Any

import torch
import vllm
from vllm import distributed
from vllm.platforms import current_platform

from . import __version__
from .errors import MismatchError, SaveError

#: Fields of a Hugging Face config that say nothing about the weights, or that vLLM itself changes.
_LOOSE_FIELDS = frozenset(
    {"_name_or_path", "name_or_path", "transformers_version", "tie_word_embeddings", "torch_dtype"}
    | {"dtype", "_commit_hash", "_attn_implementation", "attn_implementation", "use_cache"}
)

Binding = dict[str, dict[str, Any]]


def written_by() -> dict[str, str]:
    """Versions of what wrote a checkpoint."""
    return {
        "vllm-sharded-state": __version__,
        "vllm": vllm.__version__,
        "torch": torch.__version__,
    }


def rank() -> int:
    """This worker's rank among those that hold different weights: pipeline stages of TP ranks."""
    stage = distributed.get_pipeline_model_parallel_rank()
    return (
        stage * distributed.get_tensor_model_parallel_world_size()
        + distributed.get_tensor_model_parallel_rank()
    )


def binding(vllm_config: Any) -> Binding:
    """The fields that must agree between the engine that saves and the one that loads, by group.

    `runtime` binds only checkpoints in which a unit is in runtime layout.
    """
    model, parallel = vllm_config.model_config, vllm_config.parallel_config
    return {
        "world": {
            "tensor_parallel_size": parallel.tensor_parallel_size,
            "pipeline_parallel_size": parallel.pipeline_parallel_size,
            "enable_expert_parallel": bool(parallel.enable_expert_parallel),
        },
        "model": {
            "architectures": list(getattr(model.hf_config, "architectures", None) or []),
            **_config_fields(model.hf_config),
            "quantization": model.quantization,
            "dtype": str(model.dtype).removeprefix("torch."),
        },
        "runtime": {
            "vllm": vllm.__version__,
            "kv_cache_dtype": _kv_cache_dtype(vllm_config),
            "platform": current_platform.device_name,
            "device_capability": _capability(),
        },
    }


def refuse_mismatch(saved: Binding, here: Binding, runtime: bool, directory: Any) -> None:
    """Raise `MismatchError` with every field that differs, and both values.

    `runtime` tells whether the checkpoint has a unit in runtime layout.
    """
    groups = [group for group in ("world", "model", "runtime") if runtime or group != "runtime"]
    different = [
        f"  {group}.{name}: saved {there.get(name)!r}, here {here[group].get(name)!r}"
        for group in groups
        for there in [saved.get(group, {})]
        for name in sorted(there.keys() | here[group].keys())
        if there.get(name) != here[group].get(name)
    ]
    if different:
        raise MismatchError(
            f"{directory} was saved for another engine:\n" + "\n".join(different) + "\n"
            "Start the engine as it was when saving, or save again from the model's own checkpoint."
        )


def refuse_ambiguous_ranks(vllm_config: Any) -> None:
    """Raise `SaveError` where ranks that would write one file name hold different experts."""
    parallel = vllm_config.parallel_config
    if parallel.enable_expert_parallel and parallel.data_parallel_size > 1:
        raise SaveError(
            "data parallel ranks with expert parallelism hold different experts under one file "
            "name. Save with data_parallel_size=1."
        )


def _kv_cache_dtype(vllm_config: Any) -> str:
    """The dtype that attention layers use; with `auto` they take it from the checkpoint's own scheme.

    As `Attention.__init__` does (vllm/model_executor/layers/attention/attention.py), which changes
    the configuration only while the model is built.
    """
    dtype = str(vllm_config.cache_config.cache_dtype)
    scheme = getattr(vllm_config.quant_config, "kv_cache_scheme", None)
    return "fp8" if dtype == "auto" and scheme is not None else dtype


def _config_fields(hf_config: Any) -> dict[str, Any]:
    """The fields of a Hugging Face config that shape or scale what weights mean, nested ones dotted."""
    fields: dict[str, Any] = {}

    def collect(prefix: str, value: Any) -> None:
        if isinstance(value, dict) and value:
            for name, item in sorted(value.items(), key=lambda pair: str(pair[0])):
                if name not in _LOOSE_FIELDS:
                    collect(f"{prefix}.{name}", item)
        else:
            fields[prefix] = _spelled(value)

    collect("config", hf_config.to_dict())
    return fields


def _spelled(value: Any) -> Any:
    """`value` as JSON without floats: as text, `nan` and `1e-05` have one spelling everywhere."""
    if isinstance(value, dict):
        return {str(name): _spelled(item) for name, item in value.items()}
    if isinstance(value, list | tuple):
        return [_spelled(item) for item in value]
    if value is None or type(value) in (bool, int, str):
        return value
    return repr(value) if isinstance(value, float) else str(value)


def _capability() -> str | None:
    capability = current_platform.get_device_capability()
    return None if capability is None else str(capability)
