"""Peak rates of a B200, and the work of a GEMM.

NVIDIA's data sheet: 148 SMs, 8 TB/s of memory bandwidth, 9 PFLOP/s of dense FP4, which is 32768
FLOP per clock and SM at 1.85 GHz; half that rate for FP8, a quarter for BF16.
"""

from dataclasses import dataclass

from nvfp4_kernels.devices import ELEMENT_BITS
from nvfp4_kernels.gemm.sm100.choose import MACS_PER_CYCLE, SCALED_BYTES, Problem, estimate
from nvfp4_kernels.gemm.sm100.tile import Tile
from nvfp4_kernels.sm100.limits import SMS

CLOCK = 1.85e9  # Hz
MEMORY_BANDWIDTH = 8e12  # bytes per second
FLOPS = 2 * MACS_PER_CYCLE * SMS * CLOCK
FP8_FLOPS, BF16_FLOPS = FLOPS / 2, FLOPS / 4


@dataclass(frozen=True)
class Work:
    """Work of a kernel: bytes moved and operations computed.

    Attributes:
        nbytes: bytes of operands and result, each moved once.
        flops: multiplications and additions.
        rate: peak FLOP/s of a B200 for the kernel's arithmetic.
    """

    nbytes: float
    flops: float
    rate: float = FLOPS

    @property
    def speed_of_light(self) -> float:
        """Lower bound on the time in seconds: the larger of memory and compute time."""
        return max(self.nbytes / MEMORY_BANDWIDTH, self.flops / self.rate)


def work_of(problem: Problem, dtype: str, weight_batch: int | None = None) -> Work:
    """Work of ``problem`` with results of ``dtype``.

    Args:
        problem: sizes of the GEMM.
        dtype: ``"bfloat16"``, ``"float16"``, ``"float32"`` or ``"nvfp4"``.
        weight_batch: number of distinct weights, of ``problem.weights`` matrices each; None:
            ``problem.batch``.
    """
    rows = problem.batch * problem.m
    batch = problem.batch if weight_batch is None else weight_batch
    operands = (rows + batch * problem.weights * problem.n) * problem.k * SCALED_BYTES
    element = SCALED_BYTES if dtype == "nvfp4" else ELEMENT_BITS[dtype] / 8
    flops = 2.0 * rows * problem.weights * problem.n * problem.k
    return Work(operands + rows * problem.n * element, flops)


def estimated_seconds(problem: Problem, tile: Tile, sms: int = SMS) -> float:
    """Modelled, not measured, time in seconds, by which ``sm100.choose`` ranks tiles."""
    return estimate(problem, tile, sms) / CLOCK
