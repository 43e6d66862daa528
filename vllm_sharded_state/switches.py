"""What selects kernels in this process beside the configuration: environment variables, and the CPU."""

import os
import re
from typing import Any

import torch
from vllm import _custom_ops, envs
from vllm.platforms import current_platform

#: Upstream leaves these out of what its compiler depends on (`envs.compile_factors`), and they decide
#: how weights are packed.
_PACKING = ("VLLM_CPU_MOE_PREPACK", "VLLM_ZENTORCH_WEIGHT_PREPACK")

#: Words in names of variables that `envs.compile_factors` lists and that say nothing about weights:
#: processes and networks, building, front end and tools, limits and logs, compiler and communication.
#: A name that vLLM adds later has none of them, most likely, and binds.
_ELSEWHERE = re.compile(
    r"_("
    r"RAY|DP|P2P|NIXL|NIC|EC|MOONCAKE|HOST|PORT|IP|PATH|SO|TARGET|PLUGINS|PROCESS|LOOPBACK|"
    r"OMP|RESERVED|BUILD|DOCKER|IMAGE|PRECOMPILED|CI|VERSION|MAIN|USAGE|SUFFIX|RUST|TOOL|OSS|"
    r"COHERE|RESPONSES|PARSER|REGEX|XGRAMMAR|OUTLINES|FASTOKENS|MEDIA|CHAT|REQUEST|DATE|LORA|"
    r"SAMPLER|MAX|LOG|LOGGING|LOGO|DEBUG|TRACE|NANS|NAN|SCOPES|PROFILER|PROFILING|READY|"
    r"TIMEOUT|SERIALIZATION|COMPILE|CUDAGRAPH|INDUCTOR|AOT|BYTECODE|PREGRAD|STREAM|GC|MQ|"
    r"MSGPACK|RUNNER|SPINLOOP|NCCL|PYNCCL|ALLREDUCE|SYMM|DBO|DEEPEP|WARMUP|DRAIN|OFFLOAD|"
    r"OFFLOADING|EVENTS|WSL2|WORKSPACE|SLEEP|BATCHSIZE|INTERVAL|CHECK|XLA|TPU|FASTSAFETENSORS|"
    r"CONFIGURE"
    r")(_|$)"
)


def environment() -> dict[str, Any]:
    """Environment variables that select kernels and are not at their default, by name.

    Those that upstream's compiler depends on (`vllm.envs.compile_factors`), but what `_ELSEWHERE` names.
    """
    listed = {name for name in envs.compile_factors() if name.startswith("VLLM_")}
    known = envs.environment_variables
    names = {name for name in listed if not _ELSEWHERE.search(name)} | set(_PACKING)
    return {
        name: value
        for name in sorted(names & os.environ.keys() & known.keys())
        for value in [known[name]()]
        if value != _default(name)
    }


def processor() -> dict[str, Any]:
    """What vLLM asks of a CPU before it chooses how to pack weights; empty on other platforms.

    As `dispatch_cpu_unquantized_gemm` (vllm/model_executor/layers/utils.py), the CPU experts and the
    kernels of vllm/model_executor/kernels/linear do.
    """
    if not current_platform.is_cpu():
        return {}
    return {
        "cpu_architecture": current_platform.get_cpu_architecture().name,
        "cpu_instructions": torch.backends.cpu.get_cpu_capability(),
        "cpu_amx": bool(torch.cpu._is_amx_tile_supported()),
        "cpu_avx512_bf16": bool(torch.cpu._is_avx512_bf16_supported()),
        "cpu_onednn": bool(_custom_ops._supports_onednn),
    }


def _default(name: str) -> Any:
    """What vLLM takes where `name` is not set: what its own function gives when it does not see it."""
    real = os.environ
    rest = {other: value for other, value in real.items() if other != name}
    os.environ = rest  # type: ignore[assignment]  # noqa: B003 - native code keeps seeing the real one
    try:
        return envs.environment_variables[name]()
    finally:
        os.environ = real  # noqa: B003
