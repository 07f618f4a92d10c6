"""What a CTA of ``rotary_embedding`` takes of a token. No CuTe in here."""

from dataclasses import dataclass

PIECE = 8  # elements of 16 bytes, which a thread loads at once
MAX_HEAD_DIM = 1024  # of sm_90: a CTA has room for a whole head


@dataclass(frozen=True)
class RotaryTile:
    """What a CTA takes of one token.

    Attributes:
        head_dim: D.
        rotary_dim: R.
        slots: heads that threads work on side by side.
        steps: heads of a thread, one after the other.
    """

    head_dim: int
    rotary_dim: int
    slots: int
    steps: int

    @property
    def pairs(self) -> int:
        """Threads of a head with a piece of its first R/2 elements, and its partner."""
        return self.rotary_dim // (2 * PIECE)

    @property
    def pieces(self) -> int:
        """Threads of a head: those with pairs, and those that copy a piece."""
        return self.pairs + (self.head_dim - self.rotary_dim) // PIECE

    @property
    def heads(self) -> int:
        return self.slots * self.steps

    @property
    def threads(self) -> int:
        return self.slots * self.pieces
