"""GEMM with operands, memory and reference that can run any number of times."""

import torch

from nvfp4_kernels.formats.nvfp4 import Nvfp4Tensor, block_scaled_product
from tests.devices import KernelDevice
from tests.test_emulator.kernels.config import Shape
from tests.test_emulator.kernels.launch import multiply


def _operand(rows: int, k: int, seed: int) -> Nvfp4Tensor:
    """Operand that contains every E2M1 value, with scales that keep sums exact in float32."""
    random = torch.Generator().manual_seed(seed)
    data = torch.randint(0, 256, (rows, k // 2), dtype=torch.uint8, generator=random)
    scales = 2.0 ** torch.randint(-2, 3, (rows, k // 16), generator=random)
    return Nvfp4Tensor(data, scales.to(torch.float8_e4m3fn), torch.ones(())).to_blocked()


class Problem:
    """A product with operands and reference.

    Attributes:
        shape: shape of the product.
    """

    def __init__(self, shape: Shape) -> None:
        self.shape = shape
        self._a = _operand(shape.m, shape.k, 1)
        self._b = _operand(shape.n, shape.k, 2)
        product = block_scaled_product(self._a.data, self._a.scales, self._b.data, self._b.scales)
        self._reference = product.to(getattr(torch, shape.dtype))

    def run(self, device: KernelDevice) -> bool:
        """Run on ``device``; returns whether the result is exact."""
        a = _placed(device, "A", self._a)
        b = _placed(device, "B", self._b)
        c = device.output("C", self._reference)
        multiply(a, b, c, self.shape)
        return torch.equal(c.cpu(), self._reference)


def _placed(device: KernelDevice, name: str, operand: Nvfp4Tensor) -> Nvfp4Tensor:
    return Nvfp4Tensor(
        device.put(name, operand.data),
        device.put(f"SF{name}", operand.scales),
        operand.global_scale,
        operand.layout,
    )
