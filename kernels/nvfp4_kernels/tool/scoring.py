"""What the indexer's scoring asks of a B200, and the kernels that DeepSeek's shapes get."""

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
# Of each product: relu is one instruction, half an FMA of two products another half.
ISSUES, ISSUED_LANES = 1.5, 128


@dataclass(frozen=True)
class ScoreShape:
    """Queries at the end of sequences that are all alike.

    Attributes:
        name: for tables.
        fmt: of queries and keys.
        sequences, queries, keys: queries of each sequence, the last of which sees all its keys.
        paged: whether the keys are in pages.
        heads, head_dim: DeepSeek's.
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
        return ScoreProblem(
            self.fmt, self.head_dim, self.heads, self.sequences, self.queries, self.keys
        )

    @property
    def pairs(self) -> int:
        """Queries and keys that they see."""
        seen = self.queries * self.keys - self.queries * (self.queries - 1) // 2
        return self.sequences * seen

    @property
    def work(self) -> Work:
        """Each key and query moved once, each row of scores whole, and the products."""
        fmt = format_of(self.fmt)
        each = fmt.data_bytes(self.head_dim) + fmt.scale_bytes(self.head_dim)
        rows = self.sequences * self.queries
        stored = self.sequences * self.keys + rows * self.heads
        flops = 2.0 * self.pairs * self.heads * self.head_dim
        return Work(each * stored + 4 * rows * (self.keys + self.heads), flops, RATES[self.fmt])

    def relu_seconds(self, sms: int = SMS) -> float:
        """The least that relu and the sums over heads take."""
        return ISSUES * self.pairs * self.heads / (ISSUED_LANES * sms * CLOCK)


@dataclass(frozen=True)
class ScoreChoice:
    """A shape, and the kernel that it gets.

    Attributes:
        shape: above.
        tile, splits: as ``choose_config`` has them.
        estimate: seconds, as the choice was made by.
    """

    shape: ScoreShape
    tile: ScoreTile
    splits: int
    estimate: float

    @property
    def spec(self) -> KernelSpec:
        fp8 = self.shape.fmt == "fp8"
        variant = Variant(PAGE_SIZE if self.shape.paged else 0, query_factors=fp8)
        return scorer_spec(self.tile, variant)

    def json(self, kernel: int) -> dict[str, Any]:
        """All there is to say, for programs; its kernel is the one of that number."""
        work = self.shape.work
        return asdict(self.shape) | {
            "tile": asdict(self.tile), "splits": self.splits, "stages": self.tile.stages,
            "tensor_columns": self.tile.tensor_columns, "bytes": work.nbytes, "flops": work.flops,
            "speed_of_light_us": 1e6 * work.speed_of_light,
            "relu_us": 1e6 * self.shape.relu_seconds(), "estimate_us": 1e6 * self.estimate,
            "kernel": kernel,
        }  # fmt: skip


def choose_scorer(shape: ScoreShape, sms: int = SMS) -> ScoreChoice:
    """The kernel for ``shape`` on a GPU of ``sms`` multiprocessors."""
    tile, splits = choose_config(shape.problem, sms)
    return ScoreChoice(shape, tile, splits, estimate(shape.problem, tile, splits, sms) / CLOCK)


def scorer_spec(tile: ScoreTile, variant: Variant) -> KernelSpec:
    """A scoring kernel."""
    op = "indexer_logits_paged" if variant.paged else "indexer_logits"
    target = "nvfp4_kernels.indexer.sm100.kernel:IndexerLogitsSm100"
    return KernelSpec(op, target, (tile, variant))


def describe_scorer(tile: ScoreTile, variant: Variant) -> str:
    """E.g. ``"nvfp4, 64 heads, D 128, 3×1 queries, pages of 64"``."""
    words = [tile.fmt, f"{tile.num_heads} heads", f"D {tile.head_dim}"]
    words.append(f"{tile.groups}×{tile.group_queries} queries")
    words += [f"{tile.pingpong} ping-pong sets"] if tile.pingpong > 1 else []
    words.append(f"pages of {variant.page_size}" if variant.paged else "contiguous")
    return ", ".join(words)


def deepseek_shapes() -> list[ScoreShape]:
    """Decode, with and without a drafted token, and prefill, in every format."""
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
