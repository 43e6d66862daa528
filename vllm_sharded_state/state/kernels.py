"""Run a module's own kernel on a fixed input: the only way to compare what native code has packed.

Two modules that give bit-equal results on dense random inputs hold the same weights, wherever they hold
them. Mixtures of experts and attention have no such entry point; what they hold is in tensors.
"""

import functools
from collections.abc import Iterator, Mapping
from typing import Any

import torch
import vllm
from torch import nn
from vllm.config import set_current_vllm_config
from vllm.forward_context import set_forward_context
from vllm.logger import init_logger
from vllm.model_executor.layers.fused_moe.routed_experts import RoutedExperts
from vllm.model_executor.layers.linear import LinearBase
from vllm.model_executor.layers.quantization.base_config import method_has_implemented_embedding
from vllm.model_executor.layers.vocab_parallel_embedding import VocabParallelEmbedding
from vllm.platforms import current_platform
from vllm.utils.torch_utils import set_default_torch_dtype
from xxhash import xxh3_128

from vllm_sharded_state.checkpoint.memory import raw

logger = init_logger("vllm.sharded_state.kernels")

#: Rows of the fixed inputs: kernels choose other paths for one token, a few, and many.
ROWS = (1, 4, 320)
#: Largest result in bytes; many rows become fewer where each is long (the logits of a vocabulary).
RESULT_BYTES = 32 << 20
#: Words of 8 bytes that are compared at a time: where two tensors differ, most do so in the first.
_WORDS = 2 << 20
#: Token ids looked up in an embedding, spread over its rows.
LOOKUPS = 64


def has_kernel(module: nn.Module) -> bool:
    """Whether `digest` can run the kernel of `module`: experts only where that enters no collective."""
    if isinstance(module, RoutedExperts):
        parallel = module.moe_config.moe_parallel_config
        return not parallel.use_ep and parallel.dp_size == 1
    return isinstance(module, LinearBase | VocabParallelEmbedding)


def environment(device: torch.device) -> str:
    """What must agree for two processes' kernels to be expected to give the same bits."""
    parts = [vllm.__version__, torch.__version__, current_platform.get_device_name()]
    if device.type == "cpu":
        amx = torch.cpu._is_amx_tile_supported()
        parts += [torch.backends.cpu.get_cpu_capability(), f"amx {amx}", torch.get_num_threads()]
    return ", ".join(map(str, parts))


def results(
    modules: Mapping[str, nn.Module], vllm_config: Any, device: torch.device
) -> dict[str, str | None]:
    """The `digest` of each module that has a kernel; None for one that can't be run like this."""
    found: dict[str, str | None] = {}
    for name, module in modules.items():
        if has_kernel(module):
            try:
                found[name] = digest(module, vllm_config, device)
            except Exception as error:  # noqa: BLE001 - a kernel may refuse an input in any way
                logger.debug("the kernel of %s can't be run by itself: %s", name, error)
                found[name] = None
    return found


def digest(module: nn.Module, vllm_config: Any, device: torch.device) -> str:
    """A checksum of what `module`'s kernel gives for fixed inputs; no collective is entered.

    The inputs are `[rows, width]` in the model's dtype, with `rows` from `ROWS`; an embedding is also
    asked for `LOOKUPS` of its rows, and experts get every row routed to `top_k` of them. Raises whatever
    the kernel raises.
    """
    dtype = vllm_config.model_config.dtype
    checksum = xxh3_128()
    with (
        torch.no_grad(),
        set_current_vllm_config(vllm_config),
        set_forward_context(None, vllm_config),
        set_default_torch_dtype(dtype),
    ):
        for result in _results(module, dtype, device):
            host = raw(result.detach().contiguous().cpu())
            checksum.update(memoryview(host.numpy()))
    return str(checksum.hexdigest())


def _results(module: Any, dtype: torch.dtype, device: torch.device) -> Iterator[torch.Tensor]:
    method = module.quant_method
    if isinstance(module, RoutedExperts):
        for rows in ROWS:
            x = _dense_input(rows, module.hidden_size, dtype, device)
            yield method.apply(
                layer=module,
                x=x,
                **_routing(rows, module.top_k, module.global_num_experts, device),
                shared_experts=None,
                shared_experts_input=None,
            )
        return
    if isinstance(module, LinearBase):
        width = getattr(module, "input_size_per_partition", module.input_size)
        length = getattr(module, "output_size_per_partition", module.output_size)
    else:
        assert isinstance(module, VocabParallelEmbedding)
        width, length = module.embedding_dim, module.num_embeddings_per_partition
    bias = getattr(module, "bias", None)
    for rows in ROWS:
        rows = min(rows, max(ROWS[1], RESULT_BYTES // (length * dtype.itemsize)))
        result = method.apply(module, _dense_input(rows, width, dtype, device), bias)
        yield result[0] if isinstance(result, tuple) else result
    embeds = isinstance(module, VocabParallelEmbedding)
    if embeds and method_has_implemented_embedding(type(method)):
        ids = torch.linspace(0, length - 1, LOOKUPS, dtype=torch.float64).long().to(device)
        yield method.embedding(module, ids)


def same_bits(a: torch.Tensor, b: torch.Tensor) -> bool:
    """Whether two tensors have one shape, one dtype and the same bytes, whatever their strides."""
    if a.shape != b.shape or a.dtype != b.dtype:
        return False
    if a.numel() == 0:
        return True
    a, b = a.detach(), b.detach().to(a.device)
    if a.stride() == b.stride():  # transposed alike: then there are no gaps in this order
        order = sorted(range(a.dim()), key=a.stride, reverse=True)
        a, b = a.permute(order), b.permute(order)
    a, b = raw(a.contiguous()), raw(b.contiguous())
    if a.storage_offset() % 8 or b.storage_offset() % 8:
        return torch.equal(a, b)
    even = a.numel() // 8 * 8  # words are compared several times as fast as bytes
    words = zip(*(t[:even].view(torch.int64).split(_WORDS) for t in (a, b)), strict=True)
    return all(torch.equal(x, y) for x, y in words) and torch.equal(a[even:], b[even:])


def _dense_input(rows: int, width: int, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    return _noise(rows, width, dtype).to(device, copy=True)  # a kernel may write to its input


@functools.lru_cache(maxsize=16)  # layers of a model have few widths; megabytes
def _noise(rows: int, width: int, dtype: torch.dtype) -> torch.Tensor:
    generator = torch.Generator().manual_seed(20240229)
    x = torch.randn(rows, width, generator=generator, dtype=torch.float32, device="cpu")
    return x.to(dtype)


def _routing(rows: int, top_k: int, experts: int, device: torch.device) -> dict[str, torch.Tensor]:
    """Send each row to the next `top_k` experts, so that every expert gets some, with unequal weights."""
    ids = (torch.arange(rows).unsqueeze(1) + torch.arange(top_k)) % experts
    weights = torch.arange(1, top_k + 1, dtype=torch.float32).expand(rows, top_k) / (top_k + 1)
    return {
        "topk_weights": weights.contiguous().to(device),
        "topk_ids": ids.to(torch.int32).to(device),
    }
