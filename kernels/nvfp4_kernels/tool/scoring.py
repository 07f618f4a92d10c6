"""Work of the indexer's scoring, time bounds on a B200, and kernels for DeepSeek's shapes."""

from dataclasses import asdict, dataclass
from typing import Any

from nvfp4_kernels.indexer.formats import Name, format_of
from nvfp4_kernels.indexer.sm100.choose import ScoreProblem, choose_config, estimate
from nvfp4_kernels.indexer.sm100.tile import ScoreTile
from nvfp4_kernels.indexer.sm100.variant import Variant
from nvfp4_kernels.precompile.spec import KernelSpec
from nvfp4_kernels.sm100.limits import SMS
from nvfp4_kernels.tool.limits import BF16_FLOPS, CLOCK, FLOPS, FP8_FLOPS, Work

PAGE_SIZE = 64  # keys: that of vLLM's indexer caches
RATES: dict[Name, float] = {"nvfp4": FLOPS, "mxfp4": FLOPS, "fp8": FP8_FLOPS, "bf16": BF16_FLOPS}
# Instructions per product: one for relu, and half an FMA, which adds two products.
ISSUES, ISSUED_LANES = 1.5, 128


@dataclass(frozen=True)
class ScoreShape:
    """Shape of a launch: queries at the end of sequences of equal length.

    Attributes:
        name: name for tables.
        fmt: format of queries and keys.
        sequences, queries, keys: number of sequences, and queries and keys of each sequence; the
            last query sees all keys.
        paged: whether the keys are in pages.
        heads, head_dim: DeepSeek's sizes.
    """

    name: str
    fmt: Name
    sequences: int
    queries: int
    keys: int
    paged: bool
    heads: int = 64
    head_dim: int = 128

    @property
    def problem(self) -> ScoreProblem:
        """Sizes that determine the choice of a kernel."""
        return ScoreProblem(
            self.fmt, self.head_dim, self.heads, self.sequences, self.queries, self.keys
        )

    @property
    def pairs(self) -> int:
        """Number of pairs of a query and a visible key."""
        seen = self.queries * self.keys - self.queries * (self.queries - 1) // 2
        return self.sequences * seen

    @property
    def work(self) -> Work:
        """Work: keys, queries, weights and whole score rows moved once; FLOPs of visible pairs."""
        fmt = format_of(self.fmt)
        each = fmt.data_bytes(self.head_dim) + fmt.scale_bytes(self.head_dim)
        rows = self.sequences * self.queries
        stored = self.sequences * self.keys + rows * self.heads
        flops = 2.0 * self.pairs * self.heads * self.head_dim
        return Work(each * stored + 4 * rows * (self.keys + self.heads), flops, RATES[self.fmt])

    def relu_seconds(self, sms: int) -> float:
        """Lower bound on the time of ReLU and the sums over heads, in seconds."""
        return ISSUES * self.pairs * self.heads / (ISSUED_LANES * sms * CLOCK)


@dataclass(frozen=True)
class ScoreChoice:
    """Kernel chosen for a shape.

    Attributes:
        shape: the shape.
        tile, splits: result of ``choose_config``.
        estimate: estimated seconds, by which the tile was chosen.
        relu: lower bound on the seconds of ReLU and the sums over heads.
    """

    shape: ScoreShape
    tile: ScoreTile
    splits: int
    estimate: float
    relu: float

    @property
    def spec(self) -> KernelSpec:
        """Spec of the kernel."""
        fp8 = self.shape.fmt == "fp8"
        variant = Variant(PAGE_SIZE if self.shape.paged else 0, query_factors=fp8)
        return scorer_spec(self.tile, variant)

    def json(self, kernel: int) -> dict[str, Any]:
        """Choice as JSON data; ``kernel``: number of the kernel in the report."""
        work = self.shape.work
        return asdict(self.shape) | {
            "tile": asdict(self.tile), "splits": self.splits, "stages": self.tile.stages,
            "tensor_columns": self.tile.tensor_columns, "bytes": work.nbytes, "flops": work.flops,
            "speed_of_light_us": 1e6 * work.speed_of_light,
            "relu_us": 1e6 * self.relu, "estimate_us": 1e6 * self.estimate,
            "kernel": kernel,
        }  # fmt: skip


def choose_scorer(shape: ScoreShape, sms: int = SMS) -> ScoreChoice:
    """Choose the kernel for ``shape`` on a GPU of ``sms`` SMs."""
    tile, splits = choose_config(shape.problem, sms)
    seconds = estimate(shape.problem, tile, splits, sms) / CLOCK
    return ScoreChoice(shape, tile, splits, seconds, shape.relu_seconds(sms))


def scorer_spec(tile: ScoreTile, variant: Variant) -> KernelSpec:
    """Spec of a scoring kernel."""
    target = "nvfp4_kernels.indexer.sm100.kernel:IndexerLogitsSm100"
    return KernelSpec("indexer_logits", target, (tile, variant))


def describe_scorer(tile: ScoreTile, variant: Variant) -> str:
    """Describe a kernel, e.g. ``"nvfp4, 64 heads, D 128, 3×1 queries, pages of 64"``."""
    words = [tile.fmt, f"{tile.num_heads} heads", f"D {tile.head_dim}"]
    words.append(f"{tile.groups}×{tile.group_queries} queries")
    words += [f"{tile.pingpong} ping-pong sets"] if tile.pingpong > 1 else []
    words.append(f"pages of {variant.page_size}" if variant.paged else "contiguous")
    return ", ".join(words)


def deepseek_shapes() -> list[ScoreShape]:
    """Shapes of decode, with and without a draft token, and of prefill, in every format."""
    return [
        ScoreShape(name, fmt, sequences, queries, keys, paged)
        for fmt in RATES
        for name, sequences, queries, keys, paged in (
            ("decode", 64, 1, 131072, True),
            ("decode of 2", 64, 2, 131072, True),
            ("decode", 1, 1, 131072, True),
            ("prefill", 1, 4096, 32768, False),
        )
    ]
