"""Assignment of threads to vectors, and sizes of a stored vector. Imports no CuTe."""

from dataclasses import dataclass

from nvfp4_kernels.dispatch import Mode

THREADS = 256
LANE_ELEMENTS = 16  # of a vector that one thread quantises: an NVFP4 block
CHUNK = 16  # bytes of a vector that one thread copies

DATA_BITS: dict[Mode, int] = {"nvfp4": 4, "mxfp4": 4, "fp8": 8, "bf16": 16}
# Elements per scale, 0 for one scale per vector; and bytes of a scale.
SCALES: dict[Mode, tuple[int, int]] = {"nvfp4": (16, 1), "mxfp4": (32, 1), "fp8": (0, 4)}


@dataclass(frozen=True)
class VectorLayout:
    """Layout of vectors in a format.

    Attributes:
        fmt: name of the format.
        head_dim: number of elements per vector, a multiple of 32.
    """

    fmt: Mode
    head_dim: int

    @property
    def data_bytes(self) -> int:
        """Bytes of data per vector."""
        return self.head_dim * DATA_BITS[self.fmt] // 8

    @property
    def scale_bytes(self) -> int:
        """Bytes of scales per vector; 0 in bf16."""
        if self.fmt not in SCALES:
            return 0
        elements, size = SCALES[self.fmt]
        return size * (self.head_dim // elements if elements else 1)

    @property
    def quantize_lanes(self) -> int:
        """Number of adjacent lanes that quantise a vector, a power of two; some may be idle."""
        return _power_of_two(self.head_dim // LANE_ELEMENTS)

    @property
    def chunks(self) -> int:
        """Number of 16-byte chunks of a vector's data."""
        return self.data_bytes // CHUNK

    @property
    def copy_lanes(self) -> int:
        """Number of adjacent lanes that copy a vector, a power of two; some may be idle."""
        return _power_of_two(self.chunks)

    @property
    def scale_lanes(self) -> int:
        """Number of lanes that copy a vector's scales; each lane copies an equal part."""
        return 1 if self.fmt == "fp8" else self.chunks


def _power_of_two(at_least: int) -> int:
    """Least power of two ≥ ``at_least``."""
    return 1 << (at_least - 1).bit_length()


def alignment(*offsets: int) -> int:
    """Largest power of two, up to 16, that divides all ``offsets``: addresses and strides."""
    largest = CHUNK
    for value in offsets:
        while value % largest:
            largest //= 2
    return largest
