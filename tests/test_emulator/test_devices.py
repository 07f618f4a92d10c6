"""What tests find on the emulated device: memory that holds nothing right."""

import pytest
import torch

from tests.devices import cutlass_or_skip, emulated
from tests.emulator import EAGER

DTYPES = {
    torch.float32: torch.nan,
    torch.bfloat16: torch.nan,
    torch.float8_e4m3fn: torch.nan,
    torch.uint8: 0xFF,
    torch.int32: 2**31 - 1,
}


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_what_is_allocated_holds_nothing_right(dtype: torch.dtype) -> None:
    """Not even where a right result was freed, whose memory the allocator hands out again."""
    cutlass_or_skip()
    expected = torch.full((64, 64), DTYPES[dtype]).to(dtype).view(torch.uint8)
    before = torch.are_deterministic_algorithms_enabled()
    with emulated(EAGER):
        right = [torch.zeros(64, 64).to(dtype) for _ in range(8)]
        del right
        allocated = torch.zeros(1).new_empty((64, 64), dtype=dtype)
    assert torch.equal(allocated.view(torch.uint8), expected)
    assert torch.are_deterministic_algorithms_enabled() == before
