"""Initial contents of memory on the emulated device."""

import pytest
import torch

from tests.devices import cutlass_or_skip, emulated
from tests.emulator import EAGER

LARGEST = {torch.uint8: 0xFF, torch.int32: 2**31 - 1}


@pytest.mark.parametrize(
    "dtype", [torch.float32, torch.bfloat16, torch.float8_e4m3fn, *LARGEST], ids=str
)
def test_what_is_allocated_holds_nothing_right(dtype: torch.dtype) -> None:
    """New memory holds NaN or large values, even where freed results were right."""
    cutlass_or_skip()
    before = torch.are_deterministic_algorithms_enabled()
    with emulated(EAGER):
        right = [torch.zeros(64, 64).to(dtype) for _ in range(8)]
        del right
        allocated = torch.zeros(1).new_empty((64, 64), dtype=dtype).double()
    assert (allocated == LARGEST[dtype] if dtype in LARGEST else allocated.isnan()).all()
    assert torch.are_deterministic_algorithms_enabled() == before
