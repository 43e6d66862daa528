"""The digest of what is sent: of names, dtypes, shapes and bytes, in whatever order."""

import subprocess
import sys

import pytest
import torch

from vllm_sharded_state import digest
from vllm_sharded_state.checkpoint import digest as module

WEIGHTS = {
    "a.weight": torch.arange(12.0).view(3, 4).bfloat16(),
    "a.k_scale": torch.tensor(0.0123),
    "b.weight": torch.arange(6, dtype=torch.int8).view(2, 3),
    "empty": torch.empty(0, 4),
}


def changed(name: str, tensor: torch.Tensor) -> dict[str, torch.Tensor]:
    return WEIGHTS | {name: tensor}


def test_it_is_what_it_says_it_is() -> None:
    """Written out by hand, so that a trainer in another language can compute it."""
    from xxhash import xxh3_128_hexdigest as xxh

    two, one = xxh(bytes([1, 255])), xxh(bytes([0, 0, 0x80, 0x3F]))
    lines = [f'["x", "int8", [2], "{two}"]', f'["y", "float32", [], "{one}"]']
    weights = {"y": torch.tensor(1.0), "x": torch.tensor([1, -1], dtype=torch.int8)}
    assert digest(weights.items()) == xxh("\n".join(lines).encode())


def test_the_order_is_nothing() -> None:
    assert digest(WEIGHTS.items()) == digest(reversed(WEIGHTS.items()))
    assert digest(iter(WEIGHTS.items())) == digest(list(WEIGHTS.items()))


def test_where_a_tensor_lies_is_nothing() -> None:
    wide = torch.zeros(3, 8, dtype=torch.bfloat16)
    wide[:, ::2] = WEIGHTS["a.weight"]
    strided = wide[:, ::2]
    transposed = WEIGHTS["a.weight"].t().contiguous().t()
    parameter = torch.nn.Parameter(WEIGHTS["a.weight"].clone())
    for tensor in (strided, transposed, parameter):
        assert digest(changed("a.weight", tensor).items()) == digest(WEIGHTS.items())


def test_a_tensor_in_pieces(monkeypatch: pytest.MonkeyPatch) -> None:
    from vllm_sharded_state.checkpoint import checksum

    transposed = WEIGHTS["a.weight"].t().contiguous().t()
    whole = module.tensor_checksum(transposed)
    monkeypatch.setattr(checksum, "CHUNK", 8)
    assert module.tensor_checksum(transposed) == whole


def _element() -> torch.Tensor:
    other = WEIGHTS["a.weight"].clone()
    other[2, 3] = torch.nextafter(other[2, 3], torch.tensor(100.0, dtype=torch.bfloat16))
    return other


@pytest.mark.parametrize(
    "weights",
    [
        changed("a.weight", _element()),
        changed("a.weight", WEIGHTS["a.weight"].view(4, 3)),
        changed("a.weight", WEIGHTS["a.weight"].view(torch.float16)),
        changed("a.k_scale", torch.tensor(0.01233)),
        changed("a.k_scale", WEIGHTS["a.k_scale"].view(1)),
        changed("empty", torch.empty(4, 0)),
        {k: t for k, t in WEIGHTS.items() if k != "empty"},
        {k.replace("b.", "c."): t for k, t in WEIGHTS.items()},
        WEIGHTS | {"a.weight": WEIGHTS["b.weight"], "b.weight": WEIGHTS["a.weight"]},
        WEIGHTS | {"more": torch.zeros(1)},
    ],
    ids=["element", "shape", "dtype", "scale", "dim", "empty", "gone", "name", "swapped", "more"],
)
def test_whatever_differs_changes_it(weights: dict[str, torch.Tensor]) -> None:
    assert digest(weights.items()) != digest(WEIGHTS.items())


def test_a_tensor_that_comes_twice_is_not_one_that_comes_once() -> None:
    twice = [*WEIGHTS.items(), ("empty", WEIGHTS["empty"])]
    assert digest(twice) != digest(WEIGHTS.items())


def test_names_cannot_pass_for_others() -> None:
    nothing = torch.empty(0)
    one = {'a", "float32", [0], "x': nothing}
    assert digest(one.items()) != digest({"a": nothing}.items())
    assert digest({"a\nb": nothing}.items()) != digest({"a": nothing, "b": nothing}.items())


def test_a_trainer_needs_no_vllm() -> None:
    program = (
        "import sys; sys.modules['vllm'] = None\n"
        "import torch, vllm_sharded_state\n"
        "print(vllm_sharded_state.digest([('a', torch.ones(2))]))"
    )
    printed = subprocess.run([sys.executable, "-c", program], check=True, capture_output=True)
    assert printed.stdout.decode().strip() == digest([("a", torch.ones(2))])
