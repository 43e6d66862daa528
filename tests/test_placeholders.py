"""Placeholders: element `i` depends on `i` and the name alone, whatever the tensor's size and strides."""

import pytest
import torch

from vllm_sharded_state.state import placeholders

#: Fewer than a period of values, some periods, one block and a bit, several blocks.
SIZES = (1, 60, 61, 62, 1000, 61 * 1024, 61 * 1024 + 1, 61 * 1024 * 3 + 17)
DTYPES = (torch.bfloat16, torch.float32, torch.float8_e4m3fn, torch.int32, torch.uint8, torch.bool)


def _bytes(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.contiguous().view(-1).view(torch.uint8)


@pytest.mark.parametrize("seed", [0, 1])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_values_repeat_with_the_period_whatever_the_size(dtype: torch.dtype, seed: int) -> None:
    period = torch.empty(61, dtype=dtype)
    placeholders.fill(period, "a.weight", seed)
    assert len(set(period.to(torch.float32).tolist())) > 1
    for size in SIZES:
        tensor = torch.empty(size, dtype=dtype)
        placeholders.fill(tensor, "a.weight", seed)
        wanted = torch.stack([period[index % 61] for index in range(min(size, 200))])
        assert torch.equal(_bytes(tensor[:200]), _bytes(wanted))
        # The end, where a block was cut off.
        wanted = torch.stack([period[index % 61] for index in range(max(0, size - 200), size)])
        assert torch.equal(_bytes(tensor[-200:]), _bytes(wanted))


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_strides_do_not_matter(dtype: torch.dtype) -> None:
    plain, strided = torch.empty(300, 70, dtype=dtype), torch.empty(70, 300, dtype=dtype).t()
    placeholders.fill(plain, "b")
    placeholders.fill(strided, "b")
    assert torch.equal(_bytes(plain), _bytes(strided))
