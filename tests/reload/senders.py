"""Ways of sending tensors that go wrong, or that look as if they did."""

from collections.abc import Callable, Iterator
from typing import Any

Tensors = dict[str, Any]
Sent = Iterator[tuple[Any, Any]]


def one_buffer(tensors: Tensors, model: Any) -> Sent:
    """All tensors of one form come in one memory, one after the other."""
    buffers: dict[Any, Any] = {}
    for name, tensor in tensors.items():
        buffer = buffers.setdefault((tensor.shape, tensor.dtype), tensor.clone())
        yield name, buffer.copy_(tensor)


def layer_buffers(tensors: Tensors, model: Any) -> Sent:
    """The same, with memory for each tensor of a layer, which is whole when the next layer comes."""
    buffers: dict[Any, Any] = {}
    for name in sorted(tensors, key=lambda x: (x.split(".layers.")[-1][:1], x)):
        part = name.rpartition("layers.")[2][2:]
        buffer = buffers.setdefault(part, tensors[name].clone())
        yield name, buffer.copy_(tensors[name])


def live_views(tensors: Tensors, model: Any) -> Sent:
    """Two norms are exchanged, by views of the running model's own tensors."""
    first, second = (f"model.layers.{n}.input_layernorm.weight" for n in (0, 1))
    own = dict(model.named_parameters())
    yield from {first: own[second].detach(), second: own[first].detach()}.items()


def same_memory(tensors: Tensors, model: Any) -> Sent:
    """A name that nobody knows, with the memory of a tensor that follows."""
    yield "model.nowhere.weight", tensors["model.norm.weight"]
    yield from tensors.items()


def no_tensor(tensors: Tensors, model: Any) -> Sent:
    yield "model.norm.weight", None


def meta(tensors: Tensors, model: Any) -> Sent:
    yield "model.norm.weight", tensors["model.norm.weight"].to("meta")


def sparse(tensors: Tensors, model: Any) -> Sent:
    yield "model.norm.weight", tensors["model.norm.weight"].to_sparse()


def host_mirror(tensors: Tensors, model: Any) -> Sent:
    """What repeats a scale on the host, by itself."""
    import torch

    yield "model.layers.0.self_attn.attn._k_scale_cpu", torch.tensor(7.0)


def starts(tensors: Tensors, model: Any) -> Sent:
    """Another update is started in the middle of one."""
    from vllm.model_executor.model_loader import reload

    for number, item in enumerate(tensors.items()):
        if number == 5:
            reload.initialize_layerwise_reload(model)
        yield item


def finishes(tensors: Tensors, model: Any) -> Sent:
    """The update is finished in the middle of a call."""
    from vllm.config import get_current_vllm_config
    from vllm.model_executor.model_loader import reload

    for number, item in enumerate(tensors.items()):
        if number == 5:
            reload.finalize_layerwise_reload(model, get_current_vllm_config().model_config)
        yield item


SENDERS: dict[str, Callable[[Tensors, Any], Sent]] = {
    sender.__name__: sender
    for sender in (
        one_buffer,
        layer_buffers,
        live_views,
        same_memory,
        no_tensor,
        meta,
        sparse,
        host_mirror,
        starts,
        finishes,
    )
}
