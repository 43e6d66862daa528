"""The parts of a model that are processed as one, and the names that a checkpoint gives them.

A unit is a module that `process_weights_after_loading` works on, with everything below it: one linear
layer, one fused mixture of experts, one attention layer with the projections below it (MLA derives
tensors of its own from `kv_b_proj`). Any other module is a unit by itself, and nothing processes it.
"""

from collections.abc import Iterator
from dataclasses import dataclass, replace

from torch import nn
from vllm.lora.layers import BaseLayerWithLoRA
from vllm.model_executor.layers.attention import is_deferred_attention_layer
from vllm.model_executor.layers.quantization.base_config import QuantizeMethodBase

from .walk import Leaf, join, walk


@dataclass(frozen=True)
class Unit:
    """`modules` by checkpoint name, root first; `processed` tells whether upstream processes them."""

    name: str
    modules: dict[str, nn.Module]
    processed: bool

    @property
    def root(self) -> nn.Module:
        """The module whose name the unit carries."""
        return self.modules[self.name]


def is_processed(module: nn.Module) -> bool:
    """Whether upstream's `process_weights_after_loading` (model_loader/utils.py) touches `module`."""
    method = getattr(module, "quant_method", None)
    return isinstance(method, QuantizeMethodBase) or is_deferred_attention_layer(module)


def named_modules(model: nn.Module) -> dict[str, nn.Module]:
    """Each module once, under its name without LoRA wrappers, as the checkpoint knows it."""
    found: dict[str, nn.Module] = {}
    _collect(model, "", found, set())
    return found


def _collect(module: nn.Module, name: str, found: dict[str, nn.Module], seen: set[int]) -> None:
    while isinstance(module, BaseLayerWithLoRA):
        module = module.base_layer
    if id(module) in seen:
        return
    seen.add(id(module))
    found[name] = module
    for child_name, child in module._modules.items():
        if child is not None:
            _collect(child, join(name, child_name), found, seen)


def all_names(model: nn.Module) -> dict[str, list[str]]:
    """Every name under which `state_dict()` shows a module, by the one that `named_modules` gives."""
    first = {id(module): name for name, module in named_modules(model).items()}
    names: dict[str, list[str]] = {name: [] for name in first.values()}
    for name, module in model.named_modules(remove_duplicate=False):
        if id(module) in first:
            names[first[id(module)]].append(name.replace(".base_layer", ""))
    return names


def split(model: nn.Module) -> list[Unit]:
    """Split `model` into units, in the order in which its modules were registered."""
    modules = named_modules(model)
    names = {id(module): name for name, module in modules.items()}
    # An attention layer's projections may be registered with its parent first.
    owner = {
        id(below): name
        for name, module in modules.items()
        if is_deferred_attention_layer(module)
        for below in named_modules(module).values()
    }
    units: dict[str, Unit] = {}
    taken: set[int] = set()
    for name, module in modules.items():
        root = modules[owner.get(id(module), name)]
        if id(module) in taken:
            continue
        processed = is_processed(root)
        below = named_modules(root).values() if processed else [root]
        members = {names[id(m)]: m for m in below if id(m) not in taken}
        taken |= {id(m) for m in members.values()}
        units[names[id(root)]] = Unit(names[id(root)], members, processed)
    return list(units.values())


def inside(model: nn.Module) -> set[int]:
    """The ids of all modules of `model`, LoRA wrappers included: where a walk does not enter."""
    return {id(module) for module in model.modules()}


def leaves(unit: Unit, ids: set[int]) -> dict[str, Leaf]:
    """The leaves of `unit` by path; where two have one path, the later ones are numbered."""
    found: dict[str, Leaf] = {}
    for leaf in walk(unit.modules, ids):
        path, number = leaf.path, 1
        while path in found:
            number += 1
            path = f"{leaf.path}#{number}"
        found[path] = leaf if number == 1 else replace(leaf, path=path)
    return found


def all_leaves(model: nn.Module) -> Iterator[tuple[Unit, dict[str, Leaf]]]:
    """Every unit of `model` with its leaves."""
    ids = inside(model)
    for unit in split(model):
        yield unit, leaves(unit, ids)
