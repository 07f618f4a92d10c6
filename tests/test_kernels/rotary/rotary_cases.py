"""Problems of ``rotary_embedding``: slices of one projection, a table of cosines and sines."""

from dataclasses import dataclass

import pytest
import torch
from torch import Tensor

from nvfp4_kernels import rotary_embedding
from nvfp4_kernels.rotary import reference
from tests.test_kernels.bits import check_equal

BF16, FP16 = torch.bfloat16, torch.float16
POSITIONS = 50


@dataclass(frozen=True)
class Case:
    m: int
    q_heads: int = 4
    k_heads: int = 2
    head_dim: int = 64
    rotary_dim: int = 64
    dtype: torch.dtype = BF16

    def arguments(self, device: torch.device | None = None) -> tuple[Tensor, ...]:
        """Positions, q, k and cache; q and k are slices of a fused projection's result."""
        parts = self.q_heads, self.k_heads, self.k_heads
        projected = torch.randn(self.m, sum(parts) * self.head_dim).to(self.dtype).to(device)
        q, k, _ = projected.view(self.m, sum(parts), self.head_dim).split(parts, 1)
        positions = torch.randint(0, POSITIONS, (self.m,))
        return positions.to(device), q, k, self.cache().to(device)

    def cache(self) -> Tensor:
        """Cosines and sines, as vLLM makes them."""
        frequencies = 10000.0 ** -(torch.arange(0, self.rotary_dim, 2) / self.rotary_dim)
        angles = torch.arange(POSITIONS).unsqueeze(1) * frequencies
        return torch.cat((angles.cos(), angles.sin()), -1).to(self.dtype)


CASES = {
    "one token": Case(1),
    "ragged": Case(5, 3, 1),
    "no tokens": Case(0),
    "no keys": Case(2, 3, 0),
    "partial, D = 64": Case(3, rotary_dim=32),
    "partial, D = 128, odd tail": Case(3, 5, 1, 104, 48, FP16),
    "partial, one pair of pieces": Case(2, 2, 1, 256, 16),
    "D = 128": Case(7, 6, 2, 128, 128),
    "D = 256": Case(2, 2, 1, 256, 256),
    "fp16": Case(3, dtype=FP16),
    "many heads": Case(2, 64, 64, 128, 128),
    "many tokens": Case(515, 3, 2, 32, 32),
    "many tokens, partial": Case(512, 2, 1, 32, 16, FP16),
    "Llama 3 8B": Case(2, 32, 8, 128, 128),
    "Phi-4 mini": Case(1, 24, 8, 128, 96),
}
EVERY_CASE = pytest.mark.parametrize("case", CASES.values(), ids=CASES)


def check_kernel(case: Case, device: torch.device) -> None:
    """Check bit for bit; FMA changes no bit, as products of 16-bit values are exact in float32."""
    torch.manual_seed(0)
    given = case.arguments(device)
    found = rotary_embedding(*given)
    check_equal(found, reference.rotary_embedding(*(x.cpu() for x in given)))
    assert all(x.is_contiguous() for x in found)
