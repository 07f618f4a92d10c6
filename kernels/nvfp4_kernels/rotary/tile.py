"""Tile of ``rotary_embedding``: the heads of a token that a CTA rotates. Imports no CuTe."""

from dataclasses import dataclass

PIECE = 8  # elements of a vector: 16 bytes, which a thread loads at once
MAX_HEAD_DIM = 1024  # a CTA has enough threads for a whole head


@dataclass(frozen=True)
class RotaryTile:
    """Heads of one token per CTA, and the thread layout.

    Attributes:
        head_dim: D.
        rotary_dim: R.
        slots: heads that the CTA processes at once.
        steps: heads per thread.
    """

    head_dim: int
    rotary_dim: int
    slots: int
    steps: int

    @property
    def rotary_threads(self) -> int:
        """Number of threads per head that rotate: one per vector of the first R/2 elements."""
        return self.rotary_dim // (2 * PIECE)

    @property
    def head_threads(self) -> int:
        """Number of threads per head that rotate or copy."""
        return self.rotary_threads + (self.head_dim - self.rotary_dim) // PIECE

    @property
    def heads(self) -> int:
        """Number of heads per CTA."""
        return self.slots * self.steps

    @property
    def threads(self) -> int:
        """Number of threads per CTA."""
        return self.slots * self.head_threads
