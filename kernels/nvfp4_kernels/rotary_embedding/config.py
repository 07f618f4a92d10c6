"""Kernels of ``rotary_embedding``, and how one of them divides the work."""

from dataclasses import dataclass

import torch

from nvfp4_kernels.dispatch import KernelTable

DTYPES = (torch.bfloat16, torch.float16)
PIECE = 8  # elements of 16 bytes, which a thread loads at once
MAX_HEAD_DIM = 1024  # of sm_90: a CTA has room for a whole head
THREADS = 128  # of a CTA, at the most, where tokens are few
MANY_THREADS = 256  # where they are many
MANY = 512  # tokens that fill the GPU even if a thread takes several heads

KERNELS = KernelTable(
    "rotary_embedding",
    {
        ("cpu", "float"): (
            "reference",
            "nvfp4_kernels.rotary_embedding.reference:rotary_embedding",
        ),
        ("sm_90", "float"): (
            "RotaryEmbeddingSm90",
            "nvfp4_kernels.rotary_embedding.sm90:rotary_embedding",
        ),
    },
)


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


def choose_config(m: int, heads: int, head_dim: int, rotary_dim: int) -> RotaryTile:
    """For ``m`` tokens with so many heads, queries' and keys' together. Pure.

    A few tokens are spread over SMs, a head per thread. Of many, a thread takes two heads: more
    bytes are on their way, and cosines and sines are read half as often.
    """
    steps, threads = (1, THREADS) if m < MANY else (2, MANY_THREADS)
    pieces = RotaryTile(head_dim, rotary_dim, 1, 1).pieces
    ctas = -(-heads // (max(1, threads // pieces) * steps))
    return RotaryTile(head_dim, rotary_dim, -(-heads // (ctas * steps)), steps)
