"""What the threads of a row share."""

from dataclasses import dataclass

import cutlass
import cutlass.cute as cute
from cutlass import AddressSpace, Array, Boolean, Int32, Uint32, Uint64
from cutlass.experimental import primitives as ptx

from nvfp4_kernels.indexer.topk.tile import BINS, MAX_CLUSTER, MAX_TIES, WARP, Config

# Of ``cells``: candidates that were offered room; those that got it before it was used up; keys
# listed as ties; of a histogram, the bin that holds the wanted rank, its keys, those in bins above,
# those of it that CTAs of lower rank hold, and the keys of all bins.
OFFERED, FILLED, LISTED, BIN, WITHIN, ABOVE, BEFORE, TOTAL = range(8)
CELLS = 8
OF_CTA = 0  # the histogram that peers do not read; the others take turns
OF_CLUSTER = 1, 2


@dataclass(frozen=True)
class Shared:
    """Shared memory of a CTA; peers write to ``ties`` and ``greater``, and read histograms.

    Attributes:
        buffer: keys of candidates.
        bitmap: of the columns that are chosen.
        counts: chosen columns of each chunk of the bitmap, later of those before it.
        histograms: of ``BINS`` each: one for this CTA alone, two for the cluster in turn.
        totals: a number per warp.
        cells: single numbers.
        greater: of each CTA of the cluster, the keys above the interval that holds the last one.
        ties: keys of that interval, all of the cluster.
        threshold: the least key that is chosen.
    """

    buffer: Array
    bitmap: Array
    counts: Array
    histograms: Array
    totals: Array
    cells: Array
    greater: Array
    ties: Array
    threshold: Array


@dataclass(frozen=True)
class Cta:
    """Who a thread is, and what it shares.

    Attributes:
        config: of the launch.
        shared: memory.
        thread: index in the CTA, or among those of it that select together.
        warp: the same of the warp.
        lane: index in the warp.
        rank: of the CTA in the cluster.
        barrier: where they meet; 0 is that of the whole CTA.
    """

    config: Config
    shared: Shared
    thread: Int32
    warp: Int32
    lane: Int32
    rank: Int32
    barrier: Int32 | int = 0

    def meet(self) -> None:
        """Waits for all of them."""
        if isinstance(self.barrier, int):
            ptx.barrier_cta_sync(self.barrier)
        else:
            ptx.barrier_cta_sync(self.barrier, thread_count=self.config.threads)


def enter(config: Config) -> Cta:
    """This thread; allocates its CTA's shared memory."""
    thread = cute.arch.thread_idx()[0]
    rank = cute.arch.block_idx()[0] % config.cluster
    return Cta(config, _allocate(config), thread, thread // WARP, thread % WARP, rank)


def _allocate(config: Config) -> Shared:
    def words(dtype: type[cutlass.Numeric], count: int) -> Array:
        # The alignment is taken for that of every element that is stored.
        return Array(dtype, count, space=AddressSpace.smem, alignment=dtype.width // 8)

    return Shared(
        buffer=words(Uint64, config.buffer),
        bitmap=words(Uint32, config.words),
        counts=words(Int32, config.threads),
        histograms=words(Int32, 3 * BINS),
        totals=words(Int32, WARP),
        cells=words(Int32, CELLS),
        greater=words(Int32, MAX_CLUSTER),
        ties=words(Uint64, MAX_TIES),
        threshold=words(Uint64, 1),
    )


@cute.jit
def clear(cta: Cta) -> None:
    """Zeros for what is added to or may be read before it is written."""
    shared = cta.shared
    if cta.thread < CELLS:
        shared.cells.store(Int32(0), cta.thread)
    if cta.thread < MAX_CLUSTER:
        shared.greater.store(Int32(0), cta.thread)


def synchronise(cta: Cta, cluster: int) -> None:
    """All threads of the cluster, or those that select together if it is one CTA."""
    if cluster == 1:
        cta.meet()
    else:
        ptx.barrier_cluster_arrive()
        ptx.barrier_cluster_wait()


def of_peer(array: Array, rank: Int32 | int, cluster: int) -> Array:
    """The same array of another CTA."""
    return array if cluster == 1 else ptx.mapa(array, rank)


def add(array: Array, index: Int32 | int, number: Int32 | int) -> Int32:
    """Adds to an element of this CTA's shared memory; what it was before."""
    pointer = array.data_ptr(index)
    return cute.arch.atomic_add(pointer, Int32(number), sem="relaxed", scope="cta")


def count(array: Array, index: Int32 | int) -> None:
    """Adds one to an element of this CTA's shared memory."""
    one, place = Int32(1), array.data_ptr(index)
    ptx.red("add", "s32", place, one, mem_order="relaxed", mem_scope="cta")


def sum_of_warp(number: Int32) -> Int32:
    """Over all lanes, for each of them."""
    return cute.arch.warp_redux_sync(number, "add")


def lanes_before(cta: Cta, flags: Int32) -> Int32:
    """How many lanes before this one have their bit set."""
    return cute.arch.popc(flags & ((Int32(1) << cta.lane) - 1))


def vote(flag: Boolean) -> Int32:
    """A bit per lane."""
    return cute.arch.vote_ballot_sync(flag)


@cute.jit
def sum_before(cta: Cta, number: Int32) -> tuple[Int32, Int32]:
    """Over the threads before this one in its warp and over the warp."""
    included = number
    for step in cutlass.range_constexpr(5):
        earlier = cute.arch.shuffle_sync_up(included, 1 << step)
        if cta.lane >= 1 << step:
            included += earlier
    return included - number, cute.arch.shuffle_sync(included, WARP - 1)


@cute.jit
def sum_before_in_cta(cta: Cta, number: Int32) -> tuple[Int32, Int32]:
    """Over the threads before this one and over all. A barrier must come before the next call."""
    totals = cta.shared.totals
    before, total = sum_before(cta, number)
    if cta.lane == 0:
        totals.store(total, cta.warp)
    cta.meet()
    other = Int32(0)
    if cta.lane < cta.config.warps:
        other = totals[cta.lane]
    earlier = Int32(cutlass.select_(cta.lane < cta.warp, other, Int32(0)))
    return sum_of_warp(earlier) + before, sum_of_warp(other)
