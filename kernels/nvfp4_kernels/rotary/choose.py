"""Choice of the tile of ``rotary_embedding``. Imports no CuTe."""

from nvfp4_kernels.rotary.tile import RotaryTile

MAX_THREADS = 128  # per CTA, for few tokens
MANY_MAX_THREADS = 256  # per CTA, for many tokens
MANY_TOKENS = 512  # fill the GPU even if a thread has several heads


def choose_config(m: int, heads: int, head_dim: int, rotary_dim: int) -> RotaryTile:
    """Choose the tile for ``m`` tokens. Pure function.

    With few tokens a thread has one head, to occupy more SMs. With many tokens a thread has two
    heads: more loads are in flight, and cosines and sines are read half as often.

    Args:
        m: number of tokens.
        heads: number of heads of queries and keys together.
        head_dim: D.
        rotary_dim: R.
    """
    steps, threads = (1, MAX_THREADS) if m < MANY_TOKENS else (2, MANY_MAX_THREADS)
    head_threads = RotaryTile(head_dim, rotary_dim, 1, 1).head_threads
    ctas = -(-heads // (max(1, threads // head_threads) * steps))
    return RotaryTile(head_dim, rotary_dim, -(-heads // (ctas * steps)), steps)
