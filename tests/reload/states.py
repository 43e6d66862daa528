"""States of an engine, put on the configuration or the process of a loaded model for one reload.

What a state does to a real engine needs a GPU, or several; here it is what a reload can see of it.
"""

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import Any


@contextmanager
def eplb(config: Any) -> Iterator[None]:
    config.parallel_config.enable_eplb = True
    try:
        yield
    finally:
        config.parallel_config.enable_eplb = False


@contextmanager
def _offloader(nbytes: int) -> Iterator[None]:
    from vllm.model_executor.offloader import UVAOffloader, get_offloader, set_offloader

    kept, offloader = get_offloader(), UVAOffloader(cpu_offload_max_bytes=1 << 30)
    offloader.cpu_offload_bytes = nbytes
    set_offloader(offloader)
    try:
        yield
    finally:
        set_offloader(kept)


def offloaded(_: Any) -> AbstractContextManager[None]:
    """`cpu_offload_gb` on a GPU."""
    return _offloader(4096)


def nothing_to_offload(_: Any) -> AbstractContextManager[None]:
    """`cpu_offload_gb` on the CPU backend: all weights lie in host memory anyway."""
    return _offloader(0)


@contextmanager
def frozen(config: Any) -> Iterator[None]:
    from vllm.config import CompilationMode

    compilation = config.compilation_config
    kept, options = compilation.mode, compilation.inductor_compile_config
    compilation.mode = CompilationMode.VLLM_COMPILE
    compilation.inductor_compile_config = options | {"max_autotune": True}
    try:
        yield
    finally:
        compilation.mode, compilation.inductor_compile_config = kept, options


STATES: dict[str, Callable[[Any], AbstractContextManager[None]]] = {
    "eplb": eplb,
    "offloaded": offloaded,
    "nothing to offload": nothing_to_offload,
    "frozen": frozen,
}
