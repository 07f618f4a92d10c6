"""Table of every number of the timing model, with the source of each.

Sources:
    datasheet: NVIDIA's figures for the HGX B200 (148 SMs, dense BF16 2.25 PFLOP/s, HBM 8 TB/s).
    SemiAnalysis: github.com/SemiAnalysisAI/microbench-blackwell, results measured on a B200 at
        1.965 GHz; "CUTLASS loop" is its cutlass_gemm_mainloop, at a clock of 1.277 GHz by its
        MMA-bound rows.
    H200: this project's own microbenchmarks of the same PTX on an H200 (sm_90), the nearest silicon
        at hand (hopper_latencies.cu, hopper_memory.cu); equal figures on a B200 are an assumption.
    guide: CUDA C++ Programming Guide, arithmetic throughput per clock and SM (9.0; taken for 10.0).
    FA4: FlashAttention-4 (arXiv 2603.05451), which gives 8192 BF16 FLOP, 16 exponentials and 128
        bytes of shared memory per clock and SM of a B200.
"""

from dataclasses import dataclass, field, fields
from typing import Any, NamedTuple

from tests.emulator.machine.limits import B200, H200, Limits


class Parameter(NamedTuple):
    """One row of the table.

    Attributes:
        name: name of the field of :class:`Parameters`.
        value: value in ``unit``.
        unit: unit of the value.
        source: source of the value.
        assumed: whether the value is neither measured nor published for a B200.
    """

    name: str
    value: float
    unit: str
    source: str
    assumed: bool


def _is(value: float, unit: str, source: str) -> Any:
    return field(default=value, metadata={"unit": unit, "source": source, "assumed": False})


def _assumed(value: float, unit: str, why: str) -> Any:
    return field(default=value, metadata={"unit": unit, "source": why, "assumed": True})


@dataclass(frozen=True)
class Parameters:
    """Parameters of a chip. Units are in the table; "cycles" are cycles of ``clock``."""

    # The chip
    sms: float = _is(B200.sms, "SMs", "datasheet")
    clock: float = _is(
        1.85,
        "GHz",
        "datasheet: at which 148 SMs of 8192 FLOP/clk make 2.25 PFLOP/s; boost is 1.965",
    )
    sustained_clock: float = _assumed(
        1.5,
        "GHz",
        "where power holds dense MMA: published 8192^3 GEMMs fit 1.35 to 1.5; reports only",
    )
    shared_per_sm: float = _is(
        B200.shared_per_sm, "bytes", "CUDA: maximum shared memory per multiprocessor"
    )
    threads_per_sm: float = _is(B200.threads_per_sm, "threads", "CUDA: compute capability 10.0")
    registers_per_sm: float = _is(B200.registers, "registers", "CUDA: compute capability 10.0")
    ctas_per_sm: float = _is(B200.ctas_per_sm, "CTAs", "CUDA: compute capability 10.0")

    gpcs: float = _assumed(
        B200.gpcs,
        "GPCs",
        "as an H100 has (its whitepaper). SMs are spread over them in pairs, as evenly as they go: "
        "6 of 18 and 2 of 20; unpublished, and chips differ. No cluster reaches beyond its GPC",
    )

    # Issue and pipes: cycles of one scheduler's pipe per warp instruction (128 lanes/clk/SM = 1)
    schedulers: float = _is(4, "per SM", "one warp instruction per cycle each; H200")
    fma_interval: float = _is(1, "cycles", "128 FP32 FMA/clk/SM: datasheet 75 TFLOP/s FP32")
    packed_fma_interval: float = _assumed(
        2, "cycles", "f32x2 as two FMAs in one issue slot, so that 75 TFLOP/s stays the peak"
    )
    half_interval: float = _assumed(1, "cycles", "f16x2/bf16x2 FMA: H200 1.07")
    integer_interval: float = _assumed(
        2, "cycles", "64/clk/SM add, compare, logic, shift: guide, H200"
    )
    multiply_interval: float = _assumed(
        2, "cycles", "64/clk/SM integer multiply-add: guide, H200 2.03"
    )
    convert_interval: float = _assumed(2, "cycles", "64/clk/SM to f16x2, bf16x2, int: H200 2.07")
    narrow_interval: float = _assumed(4, "cycles", "to 8, 6 and 4-bit floats: H200 4.05 for e4m3x2")
    mufu_interval: float = _is(
        8, "cycles", "16/clk/SM: FA4; H200 8.02 (Blackwell Ultra has twice it)"
    )
    double_interval: float = _is(2, "cycles", "64/clk/SM: datasheet 37 TFLOP/s FP64; H200 2.04")
    shuffle_interval: float = _assumed(4, "cycles", "32 lanes/clk/SM: guide")
    population_interval: float = _assumed(
        8, "cycles", "16/clk/SM popc, clz, bfind: guide, H200 8.02"
    )

    # Latencies
    arithmetic_latency: float = _assumed(4, "cycles", "H200: FMA 4.3, IMAD 4.3, logic 4.3")
    half_latency: float = _assumed(8, "cycles", "H200 8.27")
    double_latency: float = _assumed(8, "cycles", "H200 8.27")
    convert_latency: float = _assumed(4, "cycles", "H200 4.4 to f16x2, 8.4 to e4m3x2 and back")
    mufu_latency: float = _assumed(17, "cycles", "H200 17.2")
    shuffle_latency: float = _assumed(24, "cycles", "H200 24.2")
    vote_latency: float = _assumed(13, "cycles", "H200: 17.3 with its setp")
    redux_latency: float = _assumed(44, "cycles", "H200 44.3")
    redux_interval: float = _assumed(8, "cycles", "H200 8.0")
    special_latency: float = _assumed(20, "cycles", "reading a special register")
    branch_latency: float = _assumed(13, "cycles", "taken branch: H200, loop of 4 FMAs takes 29.25")
    proxy_fence_latency: float = _assumed(9, "cycles", "fence.proxy.async: H200 9.0")
    device_fence_latency: float = _assumed(
        265,
        "cycles",
        "fence.acq_rel.gpu and .cluster, tensormap release, arrivals with release at cluster "
        "scope, once the warp's stores are performed: H200 264.7, 262; a kernel's first: H100 667",
    )
    map_fence_latency: float = _assumed(12, "cycles", "fence.proxy.tensormap acquire: H200 12.1")
    map_fetch_latency: float = _assumed(
        83, "cycles", "first use of a tensor map by an SM: H100 581 to a box, 498 if prefetched"
    )
    map_change_latency: float = _assumed(
        10, "cycles", "tensormap.replace, cp_fenceproxy: H200 9.2 in global memory, 11.4"
    )
    barrier_latency: float = _assumed(
        12, "cycles", "bar.sync, last arrival to release: H200 14, 20, 44 for 1, 4, 16 warps"
    )
    barrier_per_warp: float = _assumed(2, "cycles", "bar.sync, per participating warp: H200")
    cluster_barrier_latency: float = _assumed(80, "cycles", "relaxed arrive to wait: H200 78-86")
    arrive_latency: float = _assumed(
        30,
        "cycles",
        "mbarrier.arrive to the barrier; H200: 64 from one warp's arrive to the next one's",
    )
    wake_latency: float = _assumed(
        30, "cycles", "mbarrier flip to the waiting warp's next issue; H200"
    )
    remote_latency: float = _assumed(145, "cycles", "more for a peer CTA's mbarrier: H200 hop 212")
    peer_store_bandwidth: float = _assumed(
        20.3,
        "bytes/clk/SM",
        "st.async and stores to peer CTAs: H100, .79 cycles for 16 bytes, clusters of 2 to 8",
    )
    peer_store_latency: float = _assumed(
        302, "cycles", "from there until the peer's mbarrier counts the bytes: the same"
    )

    # Shared memory
    shared_bandwidth: float = _is(
        128, "bytes/clk/SM", "FA4; SemiAnalysis: small-N MMA bound at 128"
    )
    shared_latency: float = _assumed(23, "cycles", "H200 22.99")

    # Tensor core. An MMA of N columns eats 32 bytes of K in N/2 cycles in every kind: 8192 BF16,
    # 16384 FP8, 32768 FP4 FLOP/clk/SM; half of that work in the same time at M = 64.
    mma_columns: float = _is(
        2, "columns of N/clk", "SemiAnalysis: 128.0 cycles for N=256, 64.0 for N=128, all kinds"
    )
    mma_latency: float = _is(
        74,
        "cycles",
        "SemiAnalysis: 104 from the end of a TS MMA to mbarrier wait, less wake_latency",
    )
    mma_pair_latency: float = _is(
        34, "cycles", "SemiAnalysis: 138 instead of 104 with cta_group::2"
    )
    mma_issue_interval: float = _assumed(8, "cycles", "between MMAs of one thread")
    warp_multiply_rate: float = _assumed(
        256, "FMA/clk/scheduler", "mma.sync of 16-bit types: 1024 FMA/clk/SM, as on an A100"
    )
    warp_multiply_latency: float = _assumed(33, "cycles", "mma.sync m16n8k16: as on an H100")
    warpgroup_columns: float = _assumed(
        2, "columns of N/clk", "wgmma with K = 16: datasheet of an H100, 989 TFLOP/s at 1.83 GHz"
    )
    warpgroup_least: float = _assumed(
        45,
        "cycles",
        "of a wgmma with A in registers, however few its columns: fitted to one product of "
        "hopper_kernels.md, gate_up_proj of Llama 8B with 64 tokens",
    )
    warpgroup_latency: float = _assumed(
        33, "cycles", "from a wgmma's last column to its results: as of mma.sync"
    )
    register_change_latency: float = _assumed(
        20, "cycles", "setmaxnreg, where the registers are free: as reading a special register"
    )
    tensor_read_interval: float = _assumed(
        1, "cycles per register", "tcgen05.ld: 128 bytes/clk for each quarter of the lanes"
    )
    tensor_write_interval: float = _assumed(
        2, "cycles per register", "tcgen05.st: half of the read rate, as in arXiv 2512.02189"
    )
    tensor_read_latency: float = _assumed(
        30, "cycles", "tcgen05.ld to wait::ld, beyond its transfer"
    )
    tensor_write_latency: float = _assumed(
        20, "cycles", "tcgen05.st to wait::st, beyond its transfer"
    )
    tensor_columns: float = _is(512, "columns per SM", "PTX ISA: tensor memory")
    tensor_copy_bandwidth: float = _assumed(128, "bytes/clk/SM", "tcgen05.cp: shared memory's rate")

    # Memory
    hbm_bandwidth: float = _is(
        7.26, "TB/s", "SemiAnalysis: TMA reads, 128 KiB in flight (8 nominal)"
    )
    l2_bandwidth: float = _assumed(
        17.5, "TB/s", "64 bytes/clk/SM; SemiAnalysis measured 13.3 with HBM as the limit"
    )
    l2_latency: float = _assumed(
        430, "cycles", "H200 280, and half of about 300 for the other die (SemiAnalysis)"
    )
    hbm_latency: float = _is(
        110,
        "cycles",
        "more than L2, besides hbm_bank_time: SemiAnalysis, 900 for TMA to read 512 bytes",
    )
    hbm_bank_time: float = _assumed(
        300, "cycles", "of a bank for a piece: fitted to the queues that H200 streams wait in"
    )
    hbm_piece: float = _assumed(512, "bytes", "that a bank serves together")
    hbm_write_cost: float = _assumed(
        1.38, "bytes read", "of a byte written: H200 copies 3.88 TB/s where it reads 4.60"
    )
    l2_bytes: float = _is(126e6, "bytes", "CUDA: L2 cache size of a B200")
    fill_bandwidth: float = _assumed(
        90, "bytes/clk/SM", "loads from L2: H200 66 to 114 with 1 to 8 SMs at work"
    )
    l1_latency: float = _assumed(42, "cycles", "H200: local memory 42, global 47")
    l1_lane_bytes: float = _assumed(
        8, "bytes", "of each lane in one cycle per 128-byte line: H200 1 at 4 bytes, 2 at 16"
    )
    l1_bytes: float = _is(
        262144, "bytes/SM", "CUDA: L1 and shared memory of compute capability 10.0"
    )
    async_copy_latency: float = _assumed(
        5, "cycles", "cp.async to wait_group, more than a load's: H200 275 to 298 against 280"
    )
    tma_latency: float = _assumed(10, "cycles", "more than a load's: H200 289 against 280")
    tma_row_interval: float = _is(
        1, "cycles per 128 bytes", "SemiAnalysis, CUTLASS loop: one row of a box per clk and SM"
    )
    tma_issue_interval: float = _assumed(20, "cycles", "least time between two copies of one SM")
    store_bandwidth: float = _assumed(
        32, "bytes/clk/SM", "H200: 512 cycles for 16384 more by TMA; st 31.7 from one SM"
    )
    tma_store_latency: float = _assumed(34, "cycles", "H200: 34 for 128 bytes, to wait_group.read")
    store_visible_latency: float = _assumed(300, "cycles", "from there to wait_group: an L2 write")
    launch_control_latency: float = _assumed(600, "cycles", "clusterlaunchcontrol answer")

    # Launching
    cta_launch: float = _assumed(
        400, "cycles", "from a CTA's end to the next one's start: H200 350 to 500"
    )
    launch_overhead: float = _assumed(
        2.0, "us", "start and end of a kernel in a stream; H200: 0.51 us between empty graph nodes"
    )

    dependent_launch: float = _assumed(
        0.5,
        "us",
        "from the last CTA's launch_dependents, or exit, to the first CTA that this lets start: "
        "as between empty graph nodes",
    )
    grid_flush: float = _assumed(
        0.45,
        "us",
        "from a grid's last exit to the end of griddepcontrol.wait in the next: H200, 0.4 to 0.5 "
        "by the stamps of a layer's CTAs",
    )
    grid_launch: float = _assumed(
        0.51, "us", "from a grid's last exit to a next one that may not overlap: H200 graph nodes"
    )

    def gpc_sizes(self) -> tuple[int, ...]:
        """Number of SMs of each GPC."""
        return self.limits.gpc_sizes()

    @property
    def limits(self) -> Limits:
        """Limits of residency."""
        return Limits(
            sms=int(self.sms),
            shared_per_sm=int(self.shared_per_sm),
            threads_per_sm=int(self.threads_per_sm),
            registers=int(self.registers_per_sm),
            ctas_per_sm=int(self.ctas_per_sm),
            gpcs=int(self.gpcs),
        )

    def rows(self) -> list[Parameter]:
        """Rows of the table of parameters."""
        return [
            Parameter(
                f.name,
                getattr(self, f.name),
                f.metadata["unit"],
                f.metadata["source"],
                f.metadata["assumed"],
            )
            for f in fields(self)
        ]

    def per_cycle(self, terabytes: float) -> float:
        """TB/s of the whole chip as bytes per cycle."""
        return terabytes * 1e3 / self.clock

    def microseconds(self, cycles: float) -> float:
        return cycles / self.clock / 1e3


@dataclass(frozen=True)
class H200Parameters(Parameters):
    """Parameters of a chip with Hopper's figures where known; without tcgen05."""

    sms: float = _is(H200.sms, "SMs", "datasheet")
    clock: float = _is(1.98, "GHz", "datasheet: boost; that of this project's measurements")
    sustained_clock: float = _assumed(
        1.6,
        "GHz",
        "where power holds dense MMA: 800 of 989 TFLOP/s in hopper_kernels.md; reports only",
    )
    gpcs: float = _is(
        H200.gpcs,
        "GPCs",
        "H100 whitepaper. That SMs are spread over them in pairs, as evenly as they go (6 of 16 "
        "and 2 of 18), is assumed",
    )
    hbm_bandwidth: float = _is(
        4.6, "TB/s", "hopper_memory.cu: reads; 4.4 in the runs of hopper_kernels.md's products"
    )
    hbm_latency: float = _is(180, "cycles", "more than L2: hopper_memory.cu")
    l2_bandwidth: float = _is(8.2, "TB/s", "hopper_memory.cu: 31 bytes/clk/SM, all SMs together")
    l2_latency: float = _is(280, "cycles", "hopper_latencies.cu")
    l2_bytes: float = _is(50e6, "bytes", "CUDA: L2 cache size of an H200")


B200_TIMING = Parameters()
H200_TIMING = H200Parameters()
