"""Let layer-wise loading take any callable weight loader.

What: `vllm.model_executor.model_loader.reload.layerwise._get_weight_loader`

Why: layer-wise loading recognises its own wrappers by `loader.__name__`, so a loader without a name
    stops it: `'functools.partial' object has no attribute '__name__'`, which is what
    compressed-tensors sets for KV scales per head. And it later points the recorded arguments at
    the real parameter by the name `param`: a loader that calls its first argument otherwise writes
    into the meta tensor, and the weight keeps whatever the memory held, without an error.

How: `_get_weight_loader` is where every one of those uses gets the loader from. A loader without a
    name, without a readable signature, or whose first argument is not `param`, comes back as a
    function that has all three and calls it with the same arguments in the same order.

Since: vLLM 0.32 (seen in 0.32 and 0.33; `reload/` is the same in both).

Until: upstream marks its wrappers by an attribute of their own and replaces the first bound
    argument by position.
"""

import functools
import inspect
from typing import Any

import torch

from vllm_sharded_state.patches.contract import Function, Patch

_PARAM = "param"
_OWN_WRAPPER = "online_process_loader"


def _signature(loader: Function) -> inspect.Signature | None:
    try:
        return inspect.signature(loader)
    except ValueError:  # built in, and without a text signature
        return None


def _with_param_first(signature: inspect.Signature | None) -> inspect.Signature:
    """Return the signature with its first positional argument called `param`."""
    kind = inspect.Parameter
    if signature is None:
        return inspect.Signature(
            [
                kind(_PARAM, kind.POSITIONAL_OR_KEYWORD),
                kind("args", kind.VAR_POSITIONAL),
                kind("kwargs", kind.VAR_KEYWORD),
            ]
        )
    arguments = list(signature.parameters.values())
    if any(argument.name == _PARAM for argument in arguments):
        return signature
    first = kind(_PARAM, kind.POSITIONAL_OR_KEYWORD)
    if arguments and arguments[0].kind is kind.POSITIONAL_ONLY:
        arguments[0] = first.replace(kind=kind.POSITIONAL_ONLY)
    elif arguments and arguments[0].kind is kind.POSITIONAL_OR_KEYWORD:
        arguments[0] = first
    elif arguments and arguments[0].kind is kind.VAR_POSITIONAL:
        arguments.insert(0, first)
    return signature.replace(parameters=arguments)


def named(loader: Function) -> Function:
    """Return `loader` itself if layer-wise loading can use it, else a function that calls it."""
    name = getattr(loader, "__name__", None)
    if name == _OWN_WRAPPER:
        return loader
    signature = _signature(loader)
    if (
        name is not None
        and signature is not None
        and next(iter(signature.parameters), "") == _PARAM
    ):
        return loader

    def weight_loader(*args: Any, **kwargs: Any) -> Any:
        if _PARAM in kwargs and not args and not takes_param:
            args = (kwargs.pop(_PARAM),)
        return loader(*args, **kwargs)

    takes_param = signature is not None and _PARAM in signature.parameters
    weight_loader.__wrapped__ = loader  # type: ignore[attr-defined]
    weight_loader.__signature__ = _with_param_first(signature)  # type: ignore[attr-defined]
    return weight_loader


def make(original: Function) -> Function:
    """Return `_get_weight_loader` with its result made usable."""

    def _get_weight_loader(tensor: torch.Tensor) -> Function:
        return named(original(tensor))

    return _get_weight_loader


def _arrives(loader: Function) -> bool:
    """Reload a one-parameter layer through `loader`; does the weight hold what was loaded?"""
    from vllm.model_executor.model_loader.reload import layerwise

    layer = torch.nn.Module()
    layer.weight = torch.nn.Parameter(torch.zeros(2, device="cpu"), requires_grad=False)
    layer.weight.weight_loader = loader
    layerwise.record_metadata_for_reloading(layer)
    loaded = torch.tensor([0.375, -1.625], device="cpu")
    try:
        layerwise.initialize_layerwise_reload(layer)
        layer.weight.weight_loader(layer.weight, loaded)
        return torch.equal(layer.weight.data, loaded)
    except AttributeError:  # the missing __name__
        return False
    finally:
        # Upstream's entry holds loaders that hold the layer, so it would stay for ever.
        layerwise.LAYERWISE_INFO.pop(layer, None)


def _load(param: torch.Tensor, loaded_weight: torch.Tensor, scale: float = 2.0) -> None:
    param.data.copy_(loaded_weight * scale)


def _load_under_another_name(destination: torch.Tensor, source: torch.Tensor) -> None:
    destination.data.copy_(source)


def probe() -> bool:
    """Reload through a partial, and through a loader with other argument names; does one fail?"""
    return not all(
        _arrives(loader)
        for loader in (functools.partial(_load, scale=1.0), _load_under_another_name)
    )


PATCH = Patch(
    name="layerwise_any_loader",
    module="vllm.model_executor.model_loader.reload.layerwise",
    symbol="_get_weight_loader",
    probe=probe,
    make=make,
)
