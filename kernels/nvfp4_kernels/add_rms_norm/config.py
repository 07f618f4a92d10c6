"""Kernels of ``add_rms_norm``, and their configuration."""

from dataclasses import dataclass

import torch

from nvfp4_kernels.checks import InvalidArgument
from nvfp4_kernels.dispatch import KernelTable

DTYPES = (torch.bfloat16, torch.float16)
KERNELS = KernelTable(
    "add_rms_norm",
    {
        ("cpu", "float"): ("reference", "nvfp4_kernels.add_rms_norm.reference:add_rms_norm"),
        ("sm_90", "float"): ("AddRmsNormSm90", "nvfp4_kernels.add_rms_norm.sm90:add_rms_norm"),
    },
)

WARP = 32
VECTOR = 8  # elements of 16 bytes
THREADS, MAX_THREADS = 256, 768  # of a CTA, usually and at most
MAX_STEPS = 4  # 32 float32 sums stay in a thread's registers
MAX_K = MAX_THREADS * MAX_STEPS * VECTOR


@dataclass(frozen=True)
class NormTile:
    """A row is one CTA's: its threads read ``VECTOR`` elements each, ``steps`` times.

    Attributes:
        threads: of a CTA, whole warps.
        steps: of each thread, all loaded before the first is used.
    """

    threads: int
    steps: int

    @property
    def warps(self) -> int:
        return self.threads // WARP


def choose_config(k: int) -> NormTile:
    """The layout for rows of ``k`` elements. Pure.

    Raises:
        InvalidArgument: the row is too long for one CTA's registers.
    """
    if k > MAX_K:
        raise InvalidArgument(
            f"x: K is {k}, must be at most {MAX_K} on sm_90; normalise longer rows with torch"
        )
    vectors = -(-k // VECTOR)
    steps = min(MAX_STEPS, -(-vectors // THREADS))
    threads = -(-vectors // steps)
    return NormTile(-(-threads // WARP) * WARP, steps)
