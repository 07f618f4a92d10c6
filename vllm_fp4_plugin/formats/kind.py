"""Quantization schemes of linear layers: format of the weights and of the inputs."""

from enum import StrEnum
from typing import Literal

FP8_BLOCK_SIZE = 128  # rows and columns of a weight that share a scale
MX_BLOCK_SIZE = 32  # elements of a row that share a scale

# Input of a non-NVFP4 layer: rounded with the stored scale, rounded with dynamic scales, or
# unchanged.
Inputs = Literal["static", "dynamic", "16-bit"]


class Kind(StrEnum):
    """Quantization scheme of a linear layer; the value is the name in messages and the report."""

    NVFP4 = "NVFP4"  # NVFP4 activations too
    NVFP4_A16 = "NVFP4 weight-only"
    FP8 = "FP8 per-tensor"
    FP8_CHANNEL = "FP8 per-channel"
    FP8_BLOCK = "FP8 block"
    MXFP8 = "MXFP8"
    MXFP4 = "MXFP4"
    UNQUANTIZED = "16-bit"

    @property
    def is_nvfp4(self) -> bool:
        """Whether the weights are NVFP4, with any activations."""
        return self in (Kind.NVFP4, Kind.NVFP4_A16)

    @property
    def family(self) -> str:
        """First word of the value, in lower case, e.g. ``"fp8"`` for all FP8 schemes."""
        return self.split()[0].lower()

    def weight_bytes(self, n: int, k: int) -> int:
        """Bytes of an FP8, MXFP8 or MXFP4 weight ``(n, k)``, with scales (of FP8: in float32)."""
        scales = {
            Kind.FP8: 4,
            Kind.FP8_CHANNEL: 4 * n,
            Kind.FP8_BLOCK: 4 * -(-n // FP8_BLOCK_SIZE) * -(-k // FP8_BLOCK_SIZE),
            Kind.MXFP8: n * k // MX_BLOCK_SIZE,
            Kind.MXFP4: n * k // MX_BLOCK_SIZE,
        }
        return (n * k // 2 if self is Kind.MXFP4 else n * k) + scales[self]


NVFP4_KINDS = (Kind.NVFP4, Kind.NVFP4_A16)
