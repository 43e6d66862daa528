"""A twin of the live model on the meta device: same structure, no memory, and nothing of the live one.

A unit of the twin is materialized, filled and processed to try out what a load would do; then it is
emptied. A unit can be used once, since processing changes the objects around the weights too; the
pool builds another twin when a unit is wanted again.
"""

import copy
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn
from vllm.config import CompilationMode, VllmConfig, set_current_vllm_config
from vllm.logger import init_logger
from vllm.model_executor.layers import rotary_embedding
from vllm.model_executor.layers.fused_moe.expert_map_manager import ExpertMapManager
from vllm.model_executor.model_loader.reload.meta import materialize_meta_tensor
from vllm.model_executor.model_loader.utils import initialize_model
from vllm.model_executor.offloader import NoopOffloader, get_offloader, set_offloader
from vllm.utils.torch_utils import set_default_torch_dtype

from . import units
from .units import Unit
from .walk import Kind, Leaf, join

logger = init_logger("vllm.sharded_state.twin")


def isolated_config(vllm_config: Any) -> Any:
    """A copy of `vllm_config` that a second model can be built from without touching the first.

    Attention layers register themselves in `compilation_config.static_forward_context`, MoE layers in
    `static_all_moe_layers`, and quantization configs keep notes on the layers they have seen; so the
    twin's is made anew.
    """
    config = copy.copy(vllm_config)
    config.compilation_config = copy.copy(vllm_config.compilation_config)
    config.compilation_config.static_forward_context = {}
    for name, value in vars(vllm_config.compilation_config).items():
        if name.startswith("static_") and isinstance(value, list):
            setattr(config.compilation_config, name, [])
    config.compilation_config.mode = CompilationMode.NONE  # a twin is never run as a whole
    if vllm_config.quant_config is not None:
        config.quant_config = VllmConfig._get_quantization_config(
            vllm_config.model_config, vllm_config.load_config
        )
    return config


@contextmanager
def _private_rope_cache() -> Iterator[None]:
    """Keep the twin's rotary embeddings, which are on meta, out of the cache that all models share."""
    cache = rotary_embedding._ROPE_DICT
    kept = dict(cache)
    cache.clear()
    try:
        yield
    finally:
        cache.clear()
        cache.update(kept)


@contextmanager
def _no_offloading() -> Iterator[None]:
    """Keep the twin's layers away from the engine's offloader, which moves the layers of one model."""
    kept = get_offloader()
    if isinstance(kept, NoopOffloader):
        yield
        return
    set_offloader(NoopOffloader())
    try:
        yield
    finally:
        set_offloader(kept)


@contextmanager
def _expert_maps_on(device: torch.device) -> Iterator[None]:
    """Give the twin's expert maps their values: constructors and weight loaders read them."""
    original: Any = ExpertMapManager.__init__

    def init(self: ExpertMapManager, *args: Any, **kwargs: Any) -> None:
        with device:
            original(self, *args, **kwargs)

    ExpertMapManager.__init__ = init
    try:
        yield
    finally:
        ExpertMapManager.__init__ = original


class Twin:
    """A model on the meta device, whose units can be materialized one at a time.

    A model whose constructor can't run there is built on `device`.
    """

    def __init__(self, vllm_config: Any, device: torch.device, prefix: str = "") -> None:
        self.vllm_config = isolated_config(vllm_config)
        model_config = self.vllm_config.model_config
        with (
            _private_rope_cache(),
            _no_offloading(),
            _expert_maps_on(device),
            set_current_vllm_config(self.vllm_config),
            set_default_torch_dtype(model_config.dtype),
        ):
            try:
                with torch.device("meta"):
                    self.model = initialize_model(self.vllm_config, prefix=prefix)
            except Exception as error:  # noqa: BLE001 - a constructor may need real values anywhere
                logger.warning(
                    "This model can't be built on the meta device (%s: %s); a second one is built in "
                    "memory to find out how to save it",
                    type(error).__name__,
                    error,
                )
                self.vllm_config = isolated_config(vllm_config)
                with device, set_current_vllm_config(self.vllm_config):
                    self.model = initialize_model(self.vllm_config, prefix=prefix)
        self.units: dict[str, Unit] = {unit.name: unit for unit in units.split(self.model)}
        self.inside = units.inside(self.model)
        self._used: set[str] = set()

    def has(self, name: str) -> bool:
        """Whether the unit `name` has not been used yet."""
        return name not in self._used

    def take(self, name: str) -> Unit:
        """The unit `name`, marked as used."""
        self._used.add(name)
        return self.units[name]

    def leaves(self, unit: Unit) -> dict[str, Leaf]:
        """The leaves of one of this twin's units."""
        return units.leaves(unit, self.inside)


class TwinPool:
    """Hands out unused units, building another twin whenever each of those it has was used."""

    def __init__(self, vllm_config: Any, device: torch.device, prefix: str = "") -> None:
        self._vllm_config = vllm_config
        self._device = device
        self._prefix = prefix
        self._twins: list[Twin] = []

    def unused(self, name: str) -> Twin:
        """A twin whose unit `name` is as the constructor left it. Raises `KeyError` without one."""
        for twin in self._twins:
            if twin.has(name):
                return twin
        twin = Twin(self._vllm_config, self._device, self._prefix)
        if name not in twin.units:
            raise KeyError(name)
        self._twins.append(twin)
        return twin


def materialize(
    unit: Unit, leaves: dict[str, Leaf], device: torch.device, constants: Mapping[str, torch.Tensor]
) -> None:
    """Give every meta tensor of `unit` memory on `device`.

    The unit's own parameters are left unset, to be filled by the caller. Buffers and hidden tensors were
    computed by the constructor, or belong to another unit, and left nothing on meta; they take the value
    in `constants` (by path) when its shape and dtype agree, and ones otherwise.
    """
    by_identity: dict[int, torch.Tensor] = {}
    for leaf in leaves.values():
        if not leaf.is_tensor or not leaf.value.is_meta or leaf.assign is None:
            continue
        tensor = by_identity.get(id(leaf.value))
        if tensor is None:
            with device:
                tensor = materialize_meta_tensor(leaf.value)
            by_identity[id(leaf.value)] = tensor
            if leaf.kind is not Kind.PARAMETER:
                value = constants.get(leaf.path)
                if value is not None and (value.shape, value.dtype) == (tensor.shape, tensor.dtype):
                    tensor.data.copy_(value)
                else:
                    tensor.data.copy_(torch.ones((), device=device).to(tensor.dtype))
        leaf.assign(tensor)


def discard(unit: Unit) -> None:
    """Drop all that a used unit holds, so that its memory comes back at once."""
    for module in unit.modules.values():
        module._parameters.clear()
        module._buffers.clear()
        for name in set(vars(module)) - set(vars(nn.Module())):
            delattr(module, name)


def source_parameters(unit: Unit) -> dict[str, torch.Tensor]:
    """What `state_dict()` shows of a unit before processing, by key; tied tensors under each key."""
    found: dict[str, torch.Tensor] = {}
    for name, module in unit.modules.items():
        for key, parameter in module._parameters.items():
            if parameter is not None:
                found[join(name, key)] = parameter
        for key, buffer in module._buffers.items():
            if buffer is not None and key not in module._non_persistent_buffers_set:
                found[join(name, key)] = buffer
    return found
