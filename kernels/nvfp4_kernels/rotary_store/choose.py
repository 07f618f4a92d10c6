"""Choice of the tile of ``rotary_store``. No CuTe."""

from nvfp4_kernels.rotary_store.tile import WARP, RotaryStoreTile

RESIDENT_THREADS = 1024  # of an SM, with the registers that two heads take
MANY_THREADS, MANY_STEPS = 128, 2


def choose_config(
    tokens: int, query_heads: int, kv_heads: int, head_dim: int, rotary_dim: int, sms: int
) -> RotaryStoreTile:
    """Choose the tile for a number of tokens. Pure.

    Few tokens are spread over SMs, a warp to a CTA. Where threads with one head each would fill all
    SMs, a thread takes two heads of queries, as it has a key and its value: more loads are in
    flight, and cosines and sines are read half as often.
    """
    sizes = query_heads, kv_heads, head_dim, rotary_dim
    few = RotaryStoreTile(*sizes, threads=WARP, steps=1)
    if tokens * (query_heads + kv_heads) * few.lanes < sms * RESIDENT_THREADS:
        return few
    return RotaryStoreTile(*sizes, threads=MANY_THREADS, steps=min(MANY_STEPS, query_heads))
