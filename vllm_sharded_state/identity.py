"""What a checkpoint is bound to: the model, the layout of ranks, and for runtime layout the machine."""

import json
from collections.abc import Mapping
from dataclasses import asdict, is_dataclass
from pathlib import Path
from typing import Any

import torch
import vllm
from vllm import distributed
from vllm.platforms import current_platform

from . import __version__, switches
from .errors import MismatchError, SaveError

#: Fields of a Hugging Face config that say nothing about the weights, or that vLLM itself changes.
_LOOSE_FIELDS = frozenset(
    {"_name_or_path", "name_or_path", "transformers_version", "tie_word_embeddings", "torch_dtype"}
    | {"dtype", "_commit_hash", "_attn_implementation", "attn_implementation", "use_cache"}
)

Binding = dict[str, dict[str, Any]]

#: What to do about fields of a group that differ.
_ADVICE = {
    "world": "Start the engine with the parallel sizes of the save, or save again from the model's own "
    "checkpoint.",
    "model": "Start the engine with the configuration of the save, or save again from the model's own "
    "checkpoint.",
    "runtime": "Weights in runtime layout fit only the kernels that they were laid out for. Start the "
    "engine as it was when saving, or save\nwith layout=source (VSS_LAYOUT) to move between machines, "
    "versions and settings.",
}
#: Longest value in a message, in characters.
_SHOWN = 200


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

    `world` and `model` bind every checkpoint. `runtime` binds those in which a processed unit is in
    runtime layout, whose bytes depend on which kernels were chosen and how they lay weights out. Left
    out of it, as harmless: number of threads, sizes of batches and caches, compilation and CUDA graphs,
    none of which vLLM asks before it lays out a weight; the version of this package, which the format's
    own version stands for; and the name of the GPU, for which its capability stands (where a kernel
    still sizes a tensor by the number of its processors, another size is refused when it is filled).
    """
    model, parallel = vllm_config.model_config, vllm_config.parallel_config
    fields = {
        "world": {
            "tensor_parallel_size": parallel.tensor_parallel_size,
            "pipeline_parallel_size": parallel.pipeline_parallel_size,
            "enable_expert_parallel": bool(parallel.enable_expert_parallel),
            "expert_placement_strategy": parallel.expert_placement_strategy,
            "enable_eplb": bool(parallel.enable_eplb),
            "num_redundant_experts": parallel.eplb_config.num_redundant_experts,
        },
        "model": {
            "architectures": list(getattr(model.hf_config, "architectures", None) or []),
            **_flat("config", model.hf_config.to_dict()),
            **_quantization(vllm_config),
            "dtype": str(model.dtype).removeprefix("torch."),
        },
        "runtime": {
            "vllm": vllm.__version__,
            "torch": torch.__version__,
            "kv_cache_dtype": _kv_cache_dtype(vllm_config),
            "platform": current_platform.device_name,
            "device_capability": _capability(),
            **switches.processor(),
            **_flat("environment", switches.environment()),
        },
    }
    return {group: _spelled(values) for group, values in fields.items()}


def refuse_mismatch(
    saved: Mapping[str, Mapping[str, Any]], here: Binding, runtime: bool, directory: Any
) -> None:
    """Raise `MismatchError` with every field that differs, and both values.

    `runtime` tells whether the checkpoint has a unit in runtime layout.
    """
    different: dict[str, list[str]] = {}
    for group in ("world", "model", "runtime") if runtime else ("world", "model"):
        there = saved.get(group, {})
        different[group] = [
            f"  {group}.{name}: saved {_shown(there, name)}, here {_shown(here[group], name)}"
            for name in sorted(there.keys() | here[group].keys())
            if name not in there or name not in here[group] or there[name] != here[group][name]
        ]
    lines = [line for group in different.values() for line in group]
    if lines:
        advice = next(_ADVICE[group] for group, found in different.items() if found)
        raise MismatchError(
            f"{directory} was saved for another engine:\n" + "\n".join(lines) + f"\n{advice}"
        )


def _shown(fields: Mapping[str, Any], name: str) -> str:
    if name not in fields:
        return "nothing"
    text = repr(fields[name])
    return text if len(text) <= _SHOWN else text[:_SHOWN] + "…"


def refuse_ambiguous_ranks(vllm_config: Any) -> None:
    """Raise `SaveError` where several ranks would write under one file name."""
    parallel = vllm_config.parallel_config
    if parallel.enable_expert_parallel and parallel.data_parallel_size > 1:
        raise SaveError(
            "data parallel ranks with expert parallelism hold different experts under one file "
            "name. Save with data_parallel_size=1."
        )
    apart = parallel.tensor_parallel_size * parallel.pipeline_parallel_size
    ranks = distributed.get_world_group().world_size if _is_distributed() else apart
    if ranks != apart:
        raise SaveError(
            f"{ranks} ranks save together, and tensor and pipeline parallel sizes tell only {apart} "
            "apart: the others would write the same files.\nSave with data_parallel_size=1."
        )


def _is_distributed() -> bool:
    return torch.distributed.is_initialized()


def _kv_cache_dtype(vllm_config: Any) -> str:
    """The dtype that attention layers use; with `auto` they take it from the checkpoint's own scheme.

    As `Attention.__init__` does (vllm/model_executor/layers/attention/attention.py), which changes
    the configuration only while the model is built.
    """
    dtype = str(vllm_config.cache_config.cache_dtype)
    scheme = getattr(vllm_config.quant_config, "kv_cache_scheme", None)
    return "fp8" if dtype == "auto" and scheme is not None else dtype


def _quantization(vllm_config: Any) -> dict[str, Any]:
    """The quantization in full: its name, its configuration, and what the engine was told beside it.

    Most configurations are a field of the model's own and listed with it; some lie in a file beside it
    (`QuantizationConfig.get_config_filenames`), as `get_quant_config` looks for them
    (vllm/model_executor/model_loader/weight_utils.py).
    """
    model, quantization = vllm_config.model_config, vllm_config.quant_config
    fields: dict[str, Any] = {"quantization": model.quantization}
    told = getattr(model, "quantization_config", None)  # since 0.32
    if told is not None:
        given = asdict(told) if is_dataclass(told) and not isinstance(told, type) else told
        fields |= _flat("quantization_config", given)
    if quantization is None or getattr(model.hf_config, "quantization_config", None) is not None:
        return fields
    folder = Path(str(model.model))
    for name in quantization.get_config_filenames():
        if (folder / name).is_file():
            fields |= _flat(f"quantization.{name}", json.loads((folder / name).read_bytes()))
    return fields


def _flat(prefix: str, value: Any) -> dict[str, Any]:
    """The fields of a configuration that shape or scale what weights mean, nested ones dotted."""
    if not isinstance(value, dict) or (not value and prefix != "environment"):
        return {prefix: value}
    fields: dict[str, Any] = {}
    for name, item in value.items():
        # In a quantization's configuration nothing is loose.
        if name not in _LOOSE_FIELDS or "quantization" in prefix:
            fields |= _flat(f"{prefix}.{name}", item)
    return fields


def _spelled(value: Any) -> Any:
    """`value` as JSON without floats: as text, `nan` and `1e-05` have one spelling everywhere."""
    if isinstance(value, dict):
        return {str(name): _spelled(item) for name, item in value.items()}
    if isinstance(value, list | tuple):
        return [_spelled(item) for item in value]
    if isinstance(value, set | frozenset):
        return sorted((_spelled(item) for item in value), key=repr)
    if value is None or type(value) in (bool, int, str):
        return value
    return repr(value) if isinstance(value, float) else str(value)


def _capability() -> str | None:
    capability = current_platform.get_device_capability()
    return None if capability is None else str(capability)
