"""How ``rotary_embedding`` divides tokens and heads over CTAs. No CuTe in here."""

from nvfp4_kernels.rotary_embedding.tile import RotaryTile

THREADS = 128  # of a CTA, at the most, where tokens are few
MANY_THREADS = 256  # where they are many
MANY = 512  # tokens that fill the GPU even if a thread takes several heads


def choose_config(m: int, heads: int, head_dim: int, rotary_dim: int) -> RotaryTile:
    """For ``m`` tokens with so many heads, queries' and keys' together. Pure.

    A few tokens are spread over SMs, a head per thread. Of many, a thread takes two heads: more
    bytes are on their way, and cosines and sines are read half as often.
    """
    steps, threads = (1, THREADS) if m < MANY else (2, MANY_THREADS)
    pieces = RotaryTile(head_dim, rotary_dim, 1, 1).pieces
    ctas = -(-heads // (max(1, threads // pieces) * steps))
    return RotaryTile(head_dim, rotary_dim, -(-heads // (ctas * steps)), steps)
