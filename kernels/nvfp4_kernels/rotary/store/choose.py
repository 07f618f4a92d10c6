"""Choice of the tile of ``rotary_store``. Imports no CuTe."""

from dataclasses import replace

from nvfp4_kernels.rotary.store.tile import WARP, RotaryStoreTile

FEW_CTAS = 2  # of a warp, on each SM
MANY_THREADS, MANY_STEPS = 128, 2


def choose_config(
    tokens: int, query_heads: int, kv_heads: int, head_dim: int, rotary_dim: int, sms: int
) -> RotaryStoreTile:
    """Choose the tile for ``tokens`` tokens on ``sms`` SMs. Pure function.

    With few tokens a CTA has one warp, to occupy more SMs, and a thread one query head. If an SM
    would get more than two such CTAs, a CTA has four warps, as CTAs start one after the other, and
    a thread two query heads: more loads are in flight, and angles are read half as often.
    """
    few = RotaryStoreTile(
        head_dim, rotary_dim, query_heads=query_heads, kv_heads=kv_heads, threads=WARP, steps=1
    )
    if tokens * (query_heads + kv_heads) <= FEW_CTAS * sms * few.units:
        return few
    return replace(few, threads=MANY_THREADS, steps=min(MANY_STEPS, query_heads))
