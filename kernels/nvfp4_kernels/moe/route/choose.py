"""Choice of the CTAs that sort the slots of a batch. Imports no CuTe."""

from nvfp4_kernels.moe.route.tile import MAX_CLUSTER, MAX_STEPS, MAX_THREADS, WARP, RouteTile

MIN_THREADS = 256
CTA_SLOTS = 4096  # beyond, another CTA is worth the exchange of counts


def choose_config(slots: int, experts: int) -> RouteTile:
    """Choose 1, 2, 4 or 8 CTAs, the fewest with at most 4096 slots each, else 8. Pure function.

    Args:
        slots: number of slots of the batch.
        experts: number of experts of this rank; a CTA has at least a thread per expert.
    """
    cluster = 1
    while cluster < MAX_CLUSTER and slots > cluster * CTA_SLOTS:
        cluster *= 2
    share = -(-slots // cluster)
    threads = min(MAX_THREADS, max(MIN_THREADS, _warps(experts), _power(share // 2)))
    steps = min(MAX_STEPS, max(1, -(-share // threads)))
    return RouteTile(threads, cluster, steps, single=slots <= cluster * threads * steps)


def mapped_experts(total: int) -> int:
    """Number of entries reserved for a map of ``total`` experts: a power of two, at least 32."""
    return _power(max(total, WARP))


def _warps(threads: int) -> int:
    return -(-threads // WARP) * WARP


def _power(least: int) -> int:
    return 1 << max(0, least - 1).bit_length()
