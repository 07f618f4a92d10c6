"""A GEMM with operands, memory and reference, to run on the emulator any number of times."""

from dataclasses import dataclass
from functools import cached_property

import torch
from nvfp4_kernels.nvfp4 import Nvfp4Tensor, block_scaled_product

from tests.emulator import Gpu
from tests.test_emulator.kernels.config import GemmConfig
from tests.test_emulator.kernels.launch import multiply


def _operand(rows: int, k: int, seed: int) -> Nvfp4Tensor:
    """Every E2M1 value, and scales whose products with them add up exactly in float32."""
    random = torch.Generator().manual_seed(seed)
    data = torch.randint(0, 256, (rows, k // 2), dtype=torch.uint8, generator=random)
    scales = 2.0 ** torch.randint(-2, 3, (rows, k // 16), generator=random)
    return Nvfp4Tensor(data, scales.to(torch.float8_e4m3fn), torch.ones(())).to_blocked()


@dataclass(frozen=True)
class Problem:
    """One shape on one variant of the kernel.

    Attributes:
        m, n, k: of the product.
        config: variant.
        dtype: name of the result's torch dtype.
        sms: SMs to use; few, so that each takes several tiles.
    """

    m: int
    n: int
    k: int
    config: GemmConfig
    dtype: str = "bfloat16"
    sms: int = 4

    def __str__(self) -> str:
        config = self.config
        tile = f"{config.tile_m}x{config.tile_n}" + ("-2sm" if config.two_sm else "")
        return f"{self.m}x{self.n}x{self.k}-{self.dtype}-{tile}-{self.sms}sms"

    @cached_property
    def _operands(self) -> tuple[Nvfp4Tensor, Nvfp4Tensor]:
        return _operand(self.m, self.k, 1), _operand(self.n, self.k, 2)

    @cached_property
    def reference(self) -> torch.Tensor:
        a, b = self._operands
        product = block_scaled_product(a.data, a.scales, b.data, b.scales, 128)
        return product.to(getattr(torch, self.dtype))

    def run(self, gpu: Gpu) -> bool:
        """Runs on ``gpu``, the device of the installed runtime; whether the result is exact."""
        a, b = self._operands
        c = torch.full((self.m, self.n), torch.nan, dtype=self.reference.dtype)
        named = {"A": a.data, "SFA": a.scales, "B": b.data, "SFB": b.scales, "C": c}
        for name, tensor in named.items():
            gpu.memory.register(
                tensor.data_ptr(), tensor.nbytes, name=name, initialised=name != "C"
            )
        try:
            multiply(a, b, c, self.config, self.sms)
        finally:
            for tensor in named.values():
                gpu.memory.unregister(tensor.data_ptr())
        return torch.equal(c, self.reference)
