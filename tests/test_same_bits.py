"""Whether two tensors hold the same bytes: each byte counts, wherever and however they lie."""

import pytest
import torch

from vllm_sharded_state.state import kernels
from vllm_sharded_state.state.kernels import same_bits


@pytest.mark.parametrize("count", [1, 7, 8, 9, 41])
@pytest.mark.parametrize("offset", [0, 3, 8])
def test_each_byte_counts(monkeypatch: pytest.MonkeyPatch, count: int, offset: int) -> None:
    monkeypatch.setattr(kernels, "_WORDS", 2)
    a = torch.arange(64, dtype=torch.uint8)[offset : offset + count]
    b = a.clone()
    assert same_bits(a, b)
    for index in range(count):
        b[index] ^= 1
        assert not same_bits(a, b)
        b[index] ^= 1


def test_strides_are_nothing() -> None:
    a = torch.randn(5, 7, 6).bfloat16().permute(2, 0, 1)
    alike, dense = a.clone(memory_format=torch.preserve_format), a.contiguous()
    assert alike.stride() == a.stride() != dense.stride()
    for b in (alike, dense):
        assert same_bits(a, b)
        b[5, 4, 6] += 1
        assert not same_bits(a, b)
    repeated = torch.tensor([1.0, 2.0]).view(2, 1).expand(2, 5)
    assert same_bits(repeated, repeated.contiguous())


def test_bits_and_forms_not_values() -> None:
    zero, nan = torch.tensor([0.0]), torch.tensor([float("nan")])
    assert same_bits(nan, nan.clone())
    assert not same_bits(zero, -zero)
    assert not same_bits(zero, zero.int())
    assert not same_bits(zero, zero.view(()))
