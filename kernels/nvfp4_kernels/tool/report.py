"""Static report: resources of each kernel, and the speed of light of each GEMM."""

from collections.abc import Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import asdict, dataclass, field
from multiprocessing import get_context
from pathlib import Path
from typing import Any

from nvfp4_kernels.attention.merge.tile import MergeTile
from nvfp4_kernels.attention.sm100.tile import AttentionTile, Variant
from nvfp4_kernels.gemm.sm100.choose import choose_config
from nvfp4_kernels.gemm.sm100.tile import EpilogueConfig, Tile
from nvfp4_kernels.indexer.sm100.tile import ScoreTile
from nvfp4_kernels.indexer.sm100.variant import Variant as ScoreVariant
from nvfp4_kernels.precompile.linear_sm100 import product_spec
from nvfp4_kernels.precompile.spec import KernelSpec
from nvfp4_kernels.sm100.limits import SMS
from nvfp4_kernels.tool.build import prepare
from nvfp4_kernels.tool.limits import FLOPS, MEMORY_BANDWIDTH, Work, estimated_seconds, work_of
from nvfp4_kernels.tool.scoring import ScoreChoice, describe_scorer
from nvfp4_kernels.tool.shapes import Shape
from nvfp4_kernels.tool.static import Static, measure


@dataclass(frozen=True)
class Choice:
    """A GEMM, and the kernel chosen for it.

    Attributes:
        shape: the GEMM.
        tile, output: the kernel's configuration.
        work: bytes moved and operations.
        estimate: estimated seconds, by which the tile was chosen.
    """

    shape: Shape
    tile: Tile
    output: EpilogueConfig
    work: Work
    estimate: float

    @property
    def spec(self) -> KernelSpec:
        op = "silu_mul_gemm" if self.shape.layer.gate_up else "gemm"
        return product_spec(op, self.tile, self.output)

    @property
    def stages(self) -> int:
        return self.tile.depth(self.output.shared_bytes(self.tile))

    def json(self, kernel: int) -> dict[str, Any]:
        """Choice as JSON data; ``kernel``: number of the kernel in the report."""
        shape = self.shape
        return {
            "name": shape.name, "m": shape.m, "n": shape.layer.n, "k": shape.layer.k,
            "batch": shape.batch, "gate_up": shape.layer.gate_up, "dtype": shape.dtype,
            "tile": asdict(self.tile), "output": asdict(self.output), "stages": self.stages,
            "tensor_columns": self.tile.tensor_columns, "bytes": self.work.nbytes,
            "flops": self.work.flops, "speed_of_light_us": 1e6 * self.work.speed_of_light,
            "estimate_us": 1e6 * self.estimate, "published_us": shape.published or None,
            "kernel": kernel,
        }  # fmt: skip


def choose(shape: Shape, sms: int = SMS) -> Choice:
    """Choose the kernel for ``shape`` on a GPU of ``sms`` SMs."""
    tile, output = choose_config(shape.problem, shape.output, sms)
    seconds = estimated_seconds(shape.problem, tile, sms)
    return Choice(shape, tile, output, work_of(shape.problem, shape.dtype), seconds)


def measure_all(
    specs: Sequence[KernelSpec], arch: str, nvdisasm: Path | None, jobs: int
) -> Iterator[tuple[KernelSpec, Static]]:
    """Compile and inspect every kernel, bypassing the cache, in ``jobs`` processes."""
    with ProcessPoolExecutor(jobs, get_context("spawn"), prepare, (arch,)) as pool:
        yield from zip(specs, pool.map(_measure, specs, [nvdisasm] * len(specs)), strict=True)


def kernel_json(spec: KernelSpec, static: Static) -> dict[str, Any]:
    """Spec and static figures of a kernel as JSON data."""
    description, stages, columns = configuration(spec)
    said: dict[str, Any] = {
        "op": spec.op,
        "configuration": repr(spec.fields),
        "description": description,
    }
    said |= {"stages": stages, "tensor_columns": columns, "spills": static.spills}
    return said | asdict(static)


@dataclass
class Found:
    """GEMMs, scores and kernels of a report.

    Attributes:
        products, scores: GEMMs and scorings, with the chosen kernels.
        kernels: static figures of each compiled kernel.
    """

    products: list[Choice]
    scores: list[ScoreChoice]
    kernels: dict[KernelSpec, Static] = field(default_factory=dict)

    def numbers(self) -> dict[KernelSpec, int]:
        """Number of each kernel in the report, from 1."""
        return {spec: number for number, spec in enumerate(self.kernels, 1)}

    def spilling(self) -> list[int]:
        """Numbers of kernels that spill registers."""
        numbers = self.numbers()
        return [numbers[spec] for spec, static in self.kernels.items() if static.spills]

    def json(self) -> dict[str, Any]:
        """Report as JSON data."""
        numbers = self.numbers()
        return {
            "products": [choice.json(numbers[choice.spec]) for choice in self.products],
            "scores": [choice.json(numbers[choice.spec]) for choice in self.scores],
            "kernels": [kernel_json(spec, static) for spec, static in self.kernels.items()],
            "limits": {"bytes_per_second": MEMORY_BANDWIDTH, "flops_per_second": FLOPS},
        }


def _measure(spec: KernelSpec, nvdisasm: Path | None) -> Static:
    return measure(spec.kernel(), nvdisasm)


def describe(tile: Tile) -> str:
    """Describe a tile, e.g. ``"256×256 2cta cluster 2×1"``: rows × columns, CTA pair, cluster."""
    sides = f"{tile.columns}×{tile.rows} swap_ab" if tile.swap_ab else f"{tile.rows}×{tile.columns}"
    words = [sides]
    if tile.weights == 2:
        words.append("gate_up")
    if tile.two_cta:
        words.append("2cta")
    if tile.cluster_m * tile.cluster_n > tile.ctas:
        words.append(f"cluster {tile.cluster_m}×{tile.cluster_n}")
    if tile.split_k > 1:
        words.append(f"split-K {tile.split_k}")
    if not tile.collects:
        words.append("no collector")
    return " ".join(words)


def describe_attention(tile: AttentionTile, variant: Variant) -> str:
    """Describe a kernel, e.g. ``"2×128 rows, D 128, bfloat16, pages of 16, causal, split"``."""
    words = [f"{tile.query_tiles}×{tile.tile_rows} rows, D {tile.head_dim}", variant.dtype]
    words.append(f"pages of {variant.page_size}" if variant.page_size else variant.layout)
    words += ["lists"] * (variant.layout == "indexed")
    options = {
        "FP8 cache": tile.fp8,
        "causal": variant.causal,
        "window": variant.window,
        "soft cap": variant.soft_cap,
        "sinks": variant.sinks,
        "split": variant.split and not variant.merges,
        "split, merged by the last CTA": variant.merges,
        "rotating": variant.rotation is not None,
        "to NVFP4": variant.quantized,
    }
    return ", ".join([*words, *(name for name, given in options.items() if given)])


def configuration(spec: KernelSpec) -> tuple[str, int | None, int | None]:
    """Description, pipeline stages and tensor-memory columns of a kernel; None: does not apply."""
    tile, *others = spec.fields
    if isinstance(tile, MergeTile):
        words = f"D {tile.head_dim}, {tile.dtype} to {tile.out_dtype}, {tile.prefetch} ahead"
        return words, None, None
    output = others[0]
    if isinstance(tile, AttentionTile) and isinstance(output, Variant):
        return describe_attention(tile, output), tile.stages, tile.tensor_columns
    if isinstance(tile, ScoreTile) and isinstance(output, ScoreVariant):
        return describe_scorer(tile, output), tile.stages, tile.tensor_columns
    if isinstance(tile, Tile) and isinstance(output, EpilogueConfig):
        words = f"{describe(tile)}, {output.dtype} {output.store}"
        return words, tile.depth(output.shared_bytes(tile)), tile.tensor_columns
    dtype, per_token, rows, _ = spec.fields
    words = f"{rows.slots} rows × {rows.threads} threads × {rows.steps} blocks, {dtype}"
    return words + (" per token" if per_token else ""), None, None
