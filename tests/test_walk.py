"""The walk over a module's state: everything that a kernel could read has a path, and a setter."""

import array
import ctypes
import dataclasses
import functools

import numpy as np
import pytest
import torch
from torch import nn

from vllm_sharded_state.errors import NotRepresentableError
from vllm_sharded_state.mirrors import refuse_disagreement
from vllm_sharded_state.state.compare import compare
from vllm_sharded_state.state.units import inside, named_modules, split
from vllm_sharded_state.state.walk import Kind, walk


class Helper:
    def __init__(self, **state):
        self.__dict__.update(state)

    def method(self):
        return self


class Slots:
    __slots__ = ("__hidden", "shown")

    def __init__(self, value):
        self.__hidden = value
        self.shown = value


@dataclasses.dataclass(frozen=True)
class Frozen:
    value: object


def in_closure(value):
    def function():
        return value

    return function


def with_default(value):
    def function(x=value):
        return x

    return function


class OwnList(list):
    pass


def own_list(value):
    made = OwnList([])
    made.note = value
    return made


def on_a_parameter(value):
    parameter = nn.Parameter(torch.zeros(1))
    parameter.note = value
    return parameter


def unregistered(value):
    module = nn.Identity()
    module.note = value
    return [module]


def partial_attribute(value):
    made = functools.partial(print)
    made.note = value
    return made


HOLDERS = {
    "attribute": lambda v: v,
    "list": lambda v: [0, v],
    "tuple": lambda v: (0, v),
    "dict": lambda v: {"key": v},
    "object": lambda v: Helper(deep=v),
    "slots": Slots,
    "frozen dataclass": Frozen,
    "closure": in_closure,
    "default": with_default,
    "partial": lambda v: functools.partial(print, v, key=v),
    "bound method": lambda v: Helper(deep=v).method,
    "nested": lambda v: {"a": [Helper(deep=(Frozen(in_closure(v)),))]},
    "list of its own class": own_list,
    "attribute of a parameter": on_a_parameter,
    "module that is not registered": unregistered,
    "attribute of a partial": partial_attribute,
}


def leaves(module):
    return {leaf.path: leaf for leaf in walk({"m": module}, inside(module))}


def holding(holder, value):
    module = nn.Module()
    module.state = HOLDERS[holder](value)
    return module


@pytest.mark.parametrize("holder", HOLDERS)
def test_a_tensor_is_found_wherever_it_lies(holder):
    tensor = torch.tensor([1.0, 2.0])
    found = [leaf for leaf in leaves(holding(holder, tensor)).values() if leaf.value is tensor]
    assert found
    assert {leaf.kind for leaf in found} == {Kind.ATTRIBUTE}


@pytest.mark.parametrize("holder", HOLDERS)
def test_another_number_is_noticed_wherever_it_lies(holder):
    here, there = (leaves(holding(holder, number)) for number in (0.25, 0.75))
    difference = compare(here, there, frozenset(), bytes_matter=True)
    assert difference.values or difference.unfit
    assert compare(here, leaves(holding(holder, 0.25)), frozenset(), bytes_matter=True).is_empty


@pytest.mark.parametrize("holder", sorted(set(HOLDERS) - {"tuple", "default", "partial"}))
def test_a_number_can_be_put_back_where_python_allows_it(holder):
    live, rebuilt = holding(holder, 0.25), holding(holder, 0.75)
    places = leaves(rebuilt)
    for leaf in compare(leaves(live), places, frozenset(), bytes_matter=True).values:
        places[leaf.path].assign(leaf.value)
    assert compare(leaves(live), leaves(rebuilt), frozenset(), bytes_matter=True).is_empty


def test_the_choice_of_a_function_or_class_is_state():
    for a, b in [(torch.relu, torch.tanh), (Helper, Slots), (in_closure(1), with_default(1))]:
        here, there = nn.Module(), nn.Module()
        here.choice, there.choice = a, b
        assert compare(leaves(here), leaves(there), frozenset(), bytes_matter=True).unfit


OPAQUE = {
    "ctypes": ctypes.c_int(3),
    "array": array.array("i", [1, 2]),
    "memoryview": memoryview(b"ab"),
    "sparse": torch.eye(2).to_sparse(),
    "read-only array": np.broadcast_to(np.zeros(1), (3,)),
    "reversed array": np.arange(3)[::-1],
    "structured array": np.zeros(2, dtype=[("a", "i4")]),
}


@pytest.mark.parametrize("kind", OPAQUE)
def test_what_python_cannot_see_into_is_opaque(kind):
    module = nn.Module()
    module.state = [OPAQUE[kind]]
    assert leaves(module)["m.state[0]"].kind is Kind.OPAQUE
    assert compare(leaves(module), leaves(nn.Module()), frozenset(), True).captured == [
        "m.state[0]"
    ]


def test_filling_the_tensor_of_an_array_fills_the_array():
    module = nn.Module()
    module.state = np.zeros(3, dtype=np.float32)
    leaves(module)["m.state"].value.copy_(torch.tensor([1.0, 2.0, 3.0]))
    assert module.state.tolist() == [1.0, 2.0, 3.0]


def test_addresses_are_captured_and_never_put_back():
    here, there = nn.Module(), nn.Module()
    here.pointer, there.pointer = 0x7F00_0000_0000, 0x7F00_0000_1000
    here.boxed, there.boxed = torch.tensor(0x7F00_0000_0000), torch.tensor(0x7F00_0000_1000)
    difference = compare(leaves(here), leaves(there), frozenset(), bytes_matter=True)
    assert sorted(difference.captured) == ["m.boxed", "m.pointer"]
    assert not difference.overlay


def test_forms_that_differ_are_named_with_both():
    here, there = nn.Module(), nn.Module()
    here.register_buffer("scale", torch.ones(4))
    there.register_buffer("scale", torch.ones(1, dtype=torch.bfloat16))
    (reason,) = compare(leaves(here), leaves(there), frozenset(), bytes_matter=True).unfit
    assert "m.scale" in reason
    assert "(4,) float32" in reason
    assert "(1,) bfloat16" in reason


def test_what_the_compiler_notes_on_tensors_is_no_state():
    module = nn.Linear(3, 3)
    before = leaves(module)
    with torch.no_grad():
        torch.compile(module.forward, backend="eager")(torch.ones(1, 3))
    assert any(name.startswith("_dynamo_") for name in vars(module.weight))
    assert leaves(module).keys() == before.keys()


def test_a_module_under_two_names_is_one_unit():
    model = nn.Module()
    model.first = nn.Linear(2, 2)
    model.second = model.first
    assert list(named_modules(model)) == ["", "first"]
    assert [unit.name for unit in split(model)] == ["", "first"]


@pytest.mark.parametrize("mirror", ["_k_scale_float", "_k_scale_cpu"])
def test_a_mirror_that_disagrees_with_its_scale_is_refused(mirror):
    layer = nn.Module()
    layer.register_buffer("_k_scale", torch.tensor([0.25, 0.5]))
    layer._k_scale_float, layer._k_scale_cpu = 0.5, torch.tensor(0.5)
    refuse_disagreement(leaves(layer))
    setattr(layer, mirror, 0.25 if mirror.endswith("float") else torch.tensor(0.25))
    with pytest.raises(NotRepresentableError, match=rf"m\.{mirror} is 0\.25, m\._k_scale is 0\.5"):
        refuse_disagreement(leaves(layer))
