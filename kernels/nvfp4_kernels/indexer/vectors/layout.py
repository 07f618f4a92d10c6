"""How the threads of a CTA are laid over vectors, and how a format stores one. No CuTe in here."""

from dataclasses import dataclass

from nvfp4_kernels.dispatch import Mode

THREADS = 256
ELEMENTS = 16  # of a vector that one thread quantises: an NVFP4 block
PIECE = 16  # bytes of a vector that one thread copies

DATA_BITS: dict[Mode, int] = {"nvfp4": 4, "mxfp4": 4, "fp8": 8, "bf16": 16}
# Elements that share a scale, 0: all; and the scale's bytes.
SCALED: dict[Mode, tuple[int, int]] = {"nvfp4": (16, 1), "mxfp4": (32, 1), "fp8": (0, 4)}


@dataclass(frozen=True)
class VectorLayout:
    """Vectors of ``head_dim`` elements, a multiple of 32, in the format ``name``."""

    name: Mode
    head_dim: int

    @property
    def data_bytes(self) -> int:
        """Of one vector."""
        return self.head_dim * DATA_BITS[self.name] // 8

    @property
    def scale_bytes(self) -> int:
        """Of one vector."""
        if self.name not in SCALED:
            return 0
        elements, size = SCALED[self.name]
        return size * (self.head_dim // elements if elements else 1)

    @property
    def quantisers(self) -> int:
        """Neighbouring lanes that quantise a vector, some idle unless it is a power of two."""
        return _power_of_two(self.head_dim // ELEMENTS)

    @property
    def pieces(self) -> int:
        return self.data_bytes // PIECE

    @property
    def copiers(self) -> int:
        """Neighbouring threads that copy a vector."""
        return _power_of_two(self.pieces)

    @property
    def scale_lanes(self) -> int:
        """Of those, how many copy an equal part of the scales each."""
        return 1 if self.name == "fp8" else self.pieces


def _power_of_two(at_least: int) -> int:
    return 1 << (at_least - 1).bit_length()


def alignment(*bytes_apart: int) -> int:
    """The largest power of two up to 16 that divides all of these addresses and distances."""
    largest = PIECE
    for value in bytes_apart:
        while value % largest:
            largest //= 2
    return largest
