"""Published measurements, for comparison with the model."""

from dataclasses import dataclass
from typing import NamedTuple


class MeasuredMma(NamedTuple):
    """Measured cycles of an MMA on a B200 (SemiAnalysis, umma_throughput and umma_latency)."""

    kind: str
    from_tensor: bool
    ctas: int
    m: int
    n: int
    k: int
    interval: float
    latency: float  # from issue to the end of the wait on its mbarrier


MMAS = (
    MeasuredMma("f16", False, 1, 128, 256, 16, 128.0, 264),
    MeasuredMma("f16", False, 1, 128, 128, 16, 64.0, 200),
    MeasuredMma("f16", False, 1, 128, 96, 16, 56.0, 184),
    MeasuredMma("f16", False, 1, 128, 64, 16, 48.0, 168),
    MeasuredMma("f16", False, 1, 64, 256, 16, 128.0, 248),
    MeasuredMma("f16", False, 1, 64, 64, 16, 32.0, 152),
    MeasuredMma("f16", False, 2, 256, 256, 16, 128.0, 298),
    MeasuredMma("f16", False, 2, 256, 64, 16, 43.0, 202),
    MeasuredMma("f16", False, 2, 128, 256, 16, 64.0, 229),
    MeasuredMma("f16", False, 2, 128, 64, 16, 25.0, 173),
    MeasuredMma("f16", True, 1, 128, 256, 16, 128.0, 232),
    MeasuredMma("f16", True, 1, 128, 64, 16, 32.0, 136),
    MeasuredMma("f16", True, 2, 256, 128, 16, 64.0, 202),
    MeasuredMma("f16", True, 2, 128, 64, 16, 18.0, 162),
    MeasuredMma("f8f6f4", False, 1, 128, 128, 32, 64.0, 200),
    MeasuredMma("mxf8f6f4", False, 1, 128, 256, 32, 128.0, 265),
    MeasuredMma("mxf4", False, 1, 128, 128, 64, 64.0, 201),
    MeasuredMma("mxf4", False, 2, 256, 256, 64, 128.0, 301),
)


class MeasuredCopies(NamedTuple):
    """Measured cycles per TMA load, all 148 SMs reading HBM (SemiAnalysis, tma2d_throughput).

    Attributes:
        nbytes: size of a load.
        stages: loads of an SM in flight at once.
        cycles: mean time between an SM's loads.
    """

    nbytes: int
    stages: int
    cycles: float


COPIES_CLOCK = 1.965
COPIES = (
    MeasuredCopies(512, 1, 900),
    MeasuredCopies(512, 4, 257),
    MeasuredCopies(2048, 1, 968),
    MeasuredCopies(2048, 4, 282),
    MeasuredCopies(8192, 1, 1258),
    MeasuredCopies(8192, 2, 663),
    MeasuredCopies(8192, 4, 406),
    MeasuredCopies(16384, 1, 1405),
    MeasuredCopies(16384, 2, 826),
    MeasuredCopies(16384, 4, 659),
    MeasuredCopies(32768, 1, 1757),
    MeasuredCopies(32768, 2, 1328),
    MeasuredCopies(32768, 4, 1364),
)


class MeasuredStream(NamedTuple):
    """Measured GB/s of H200 SMs that each run one CTA with 16-byte loads (hopper_memory.cu)."""

    threads: int
    loads: int  # loads of a thread, under way at once
    rate: float


STREAMS = (
    MeasuredStream(32, 1, 172),
    MeasuredStream(32, 4, 636),
    MeasuredStream(128, 1, 693),
    MeasuredStream(128, 4, 2065),
    MeasuredStream(256, 1, 1340),
    MeasuredStream(256, 4, 3486),
    MeasuredStream(512, 1, 2475),
    MeasuredStream(512, 4, 4360),
    MeasuredStream(1024, 1, 3878),
    MeasuredStream(1024, 4, 4486),
)
STREAM_COPY = 3860.0  # GB/s read and written by two CTAs of 1024 threads an SM, 4 loads each
STREAM_MANY = 4600.0  # GB/s read by many CTAs of 256 threads, of 1 or 4 loads each


@dataclass(frozen=True)
class Kernel:
    """One of NVIDIA's examples, run as a whole or extrapolated from two small runs.

    The small runs have one and two steps of the work that each cluster repeats; the whole run has
    ``steps``.

    Attributes:
        name: unique name.
        script: path under ``examples/python/CuTeDSL``.
        arguments: command line, with ``{steps}`` where the runs differ.
        sizes: values of ``{steps}`` for one and for two steps; a single value for a whole run.
        sms: number of SMs to emulate, small enough that one cluster does all the steps; 0 for the
            whole chip.
        clusters: number of clusters of the chip in each run.
        footprint: bytes that all clusters read from HBM in one step.
        steps: number of steps of the longest cluster in the whole problem.
        waves: number of such clusters that run one after the other.
        flops: operations of the whole problem.
        published: (TFLOP/s, source) of published measurements of the same problem.
        launched: whether the measurements include the launch overhead.
    """

    name: str
    script: str
    arguments: str
    sizes: tuple[str, ...]
    sms: int
    clusters: int
    footprint: float
    steps: int
    waves: int
    flops: float
    published: tuple[tuple[float, str], ...]
    launched: bool = False


_GEMM = "cute/blackwell/kernel/dense_gemm/dense_gemm_persistent.py"
_BLOCK_SCALED = "cute/blackwell/kernel/blockscaled_gemm/dense_blockscaled_gemm_persistent.py"
_TILES = "--mma_tiler_mn 256,256 --cluster_shape_mn 2,1"
# 1024 tiles of 256 x 256 over 74 pairs of SMs; a wave reads all rows of A and a few panels of B.
KERNELS = (
    Kernel(
        "BF16 GEMM 8192^3",
        _GEMM,
        "--mnkl 256,{steps},8192,1 --ab_dtype BFloat16 --c_dtype BFloat16 --use_2cta_instrs "
        f"--use_tma_store {_TILES}",
        ("256", "512"),
        2,
        74,
        1.44e8,
        14,
        1,
        2 * 8192**3,
        (
            (1610, "cuBLAS and Tilus, pipes 96.6% busy (nvidia.github.io/tilus, matmul tutorial)"),
            (1772, "Modular, matmul on Blackwell part 4"),
        ),
    ),
    Kernel(
        "NVFP4 GEMM 8192^3",
        _BLOCK_SCALED,
        "--mnkl 256,{steps},8192,1 --a_dtype Float4E2M1FN --b_dtype Float4E2M1FN "
        f"--sf_dtype Float8E4M3FN --sf_vec_size 16 --c_dtype BFloat16 {_TILES}",
        ("256", "512"),
        2,
        74,
        4.0e7,
        14,
        1,
        2 * 8192**3,
        (
            (5239, "cuBLASLt 13.3, MXFP4 (deepseek-ai/DeepGEMM pull request 348)"),
            (5702, "DeepGEMM, MXFP4 (the same)"),
        ),
    ),
    Kernel(
        "BF16 attention forward, 16 heads of 128, 16384 tokens",
        "cute/blackwell/kernel/attention/fmha/fmha.py",
        "--in_dtype BFloat16 --out_dtype BFloat16 --q_shape 1,256,1,128 --k_shape 1,{steps},1,128",
        ("1024", "2048"),
        0,
        148,
        1.2e6,
        16,
        7,
        4 * 16384**2 * 128 * 16,
        ((1605, "FlashAttention-4, another kernel (arXiv 2603.05451)"),),
    ),
    *(
        Kernel(
            f"FP16 GEMM {m} x 2048 x 1024, with its launch",
            _GEMM,
            f"--mnkl {m},2048,1024,1 --ab_dtype Float16 --c_dtype Float16 --mma_tiler_mn 128,128 "
            "--cluster_shape_mn 1,1 --use_tma_store",
            ("",),
            0,
            m // 8,
            (m + 2048) * 1024 * 2,
            1,
            1,
            2 * m * 2048 * 1024,
            ((2 * m * 2048 * 1024 / us / 1e6, f"cuBLAS, {us} µs (NVIDIA/cutlass issue 2923)"),),
            launched=True,
        )
        for m, us in ((128, 5.06), (1024, 7.14))
    ),
)
