"""Thread groups that select the top-k together: shared memory, barriers, sums."""

from dataclasses import dataclass

import cutlass
import cutlass.cute as cute
from cutlass import AddressSpace, Array, Boolean, Int32, Uint32, Uint64
from cutlass.experimental import primitives as ptx

from nvfp4_kernels.indexer.topk.tile import BINS, MAX_CLUSTER, MAX_TIES, WARP, TopkTile

# Indices into ``counters``: candidates appended, or refused by a full buffer; candidates stored
# until the buffer was full; keys listed as ties; of a histogram, the bin that holds the wanted
# rank, the bin's keys, keys in higher bins, the bin's keys in CTAs of lower rank, and the keys of
# all bins.
APPENDED, FILLED, LISTED, BIN, WITHIN, ABOVE, BEFORE, TOTAL = range(8)
NUM_COUNTERS = 8
CTA_HISTOGRAM = 0  # not read by peers; passes over the cluster alternate between the others
CLUSTER_HISTOGRAMS = 1, 2


@dataclass(frozen=True)
class SharedStorage:
    """Shared memory of a CTA; peer CTAs write ``ties`` and ``greater``, and read ``histograms``.

    Attributes:
        buffer: keys of candidates.
        bitmap: one bit per column, set for selected columns.
        counts: number of selected columns per chunk of the bitmap, later the exclusive scan of
            these counts.
        histograms: three histograms of ``BINS`` bins: one for this CTA alone, two for the cluster.
        totals: one number per warp, used by ``group_exclusive_sum``.
        counters: single numbers, indexed by the constants ``APPENDED`` to ``TOTAL``.
        greater: number of keys above the threshold's interval, per CTA of the cluster.
        ties: keys in the threshold's interval, of all CTAs of the cluster.
        threshold: least selected key.
    """

    buffer: Array
    bitmap: Array
    counts: Array
    histograms: Array
    totals: Array
    counters: Array
    greater: Array
    ties: Array
    threshold: Array


@dataclass(frozen=True)
class ThreadGroup:
    """Thread group that selects together (a CTA, or some of its warps), as seen by one thread.

    Attributes:
        tile: tile of the group.
        shared: shared memory of the group.
        thread: index of the thread in the group.
        warp: index of the warp in the group.
        lane: index of the thread in the warp.
        rank: rank of the CTA in the cluster.
        barrier: index of the group's named barrier; 0 for the whole CTA.
    """

    tile: TopkTile
    shared: SharedStorage
    thread: Int32
    warp: Int32
    lane: Int32
    rank: Int32
    barrier: Int32 | int = 0

    def sync(self) -> None:
        """Barrier over all threads of the group."""
        if isinstance(self.barrier, int):
            ptx.barrier_cta_sync(self.barrier)
        else:
            ptx.barrier_cta_sync(self.barrier, thread_count=self.tile.threads)


def cta_group(tile: TopkTile) -> ThreadGroup:
    """Thread group of the whole CTA; allocates its shared memory."""
    thread = cute.arch.thread_idx()[0]
    rank = cute.arch.block_idx()[0] % tile.cluster
    return ThreadGroup(tile, _allocate(tile), thread, thread // WARP, thread % WARP, rank)


def _allocate(tile: TopkTile) -> SharedStorage:
    """Allocate the shared memory of a CTA."""

    def words(dtype: type[cutlass.Numeric], count: int) -> Array:
        # CuTe takes the array's alignment for that of every element stored.
        return Array(dtype, count, space=AddressSpace.smem, alignment=dtype.width // 8)

    return SharedStorage(
        buffer=words(Uint64, tile.capacity),
        bitmap=words(Uint32, tile.words),
        counts=words(Int32, tile.threads),
        histograms=words(Int32, 3 * BINS),
        totals=words(Int32, WARP),
        counters=words(Int32, NUM_COUNTERS),
        greater=words(Int32, MAX_CLUSTER),
        ties=words(Uint64, MAX_TIES),
        threshold=words(Uint64, 1),
    )


@cute.jit
def clear(group: ThreadGroup) -> None:
    """Clear counters and other memory that may be read before its first write."""
    shared = group.shared
    if group.thread < NUM_COUNTERS:
        shared.counters.store(Int32(0), group.thread)
    if group.thread < MAX_CLUSTER:
        shared.greater.store(Int32(0), group.thread)


def sync_cluster(group: ThreadGroup, cluster: int) -> None:
    """Barrier over all threads of the cluster, or of the group if ``cluster`` is 1."""
    if cluster == 1:
        group.sync()
    else:
        ptx.barrier_cluster_arrive()
        ptx.barrier_cluster_wait()


def map_shared_rank(array: Array, rank: Int32 | int, cluster: int) -> Array:
    """Counterpart of ``array`` in the shared memory of CTA ``rank`` of the cluster."""
    return array if cluster == 1 else ptx.mapa(array, rank)


def fetch_add(array: Array, index: Int32 | int, number: Int32 | int) -> Int32:
    """Add ``number`` to an element of this CTA's shared memory atomically; return the old value."""
    pointer = array.data_ptr(index)
    return cute.arch.atomic_add(pointer, Int32(number), sem="relaxed", scope="cta")


def increment(array: Array, index: Int32 | int) -> None:
    """Add one to an element of this CTA's shared memory atomically."""
    one, address = Int32(1), array.data_ptr(index)
    ptx.red("add", "s32", address, one, mem_order="relaxed", mem_scope="cta")


def warp_sum(number: Int32) -> Int32:
    """Sum of ``number`` over all lanes of the warp, returned to each lane."""
    return cute.arch.warp_redux_sync(number, "add")


def count_lanes_before(group: ThreadGroup, flags: Int32) -> Int32:
    """Number of lower lanes whose bit in ``flags`` is set."""
    return cute.arch.popc(flags & ((Int32(1) << group.lane) - 1))


def ballot(flag: Boolean) -> Int32:
    """Ballot of the warp: bit n is the ``flag`` of lane n."""
    return cute.arch.vote_ballot_sync(flag)


@cute.jit
def warp_exclusive_sum(group: ThreadGroup, number: Int32) -> tuple[Int32, Int32]:
    """Sum of ``number`` over the lower lanes of the warp, and over all lanes."""
    included = number
    for step in cutlass.range_constexpr(5):
        earlier = cute.arch.shuffle_sync_up(included, 1 << step)
        if group.lane >= 1 << step:
            included += earlier
    return included - number, cute.arch.shuffle_sync(included, WARP - 1)


@cute.jit
def group_exclusive_sum(group: ThreadGroup, number: Int32) -> tuple[Int32, Int32]:
    """Sum of ``number`` over the group's lower threads, and over all threads.

    Callers must sync before the next call.
    """
    totals = group.shared.totals
    before, total = warp_exclusive_sum(group, number)
    if group.lane == 0:
        totals.store(total, group.warp)
    group.sync()
    other = Int32(0)
    if group.lane < group.tile.warps:
        other = totals[group.lane]
    earlier = Int32(cutlass.select_(group.lane < group.warp, other, Int32(0)))
    return warp_sum(earlier) + before, warp_sum(other)
