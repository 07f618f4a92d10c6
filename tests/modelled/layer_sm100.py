"""Traced launches of a decode layer's products on Blackwell."""

import math
from typing import TYPE_CHECKING

from tests.modelled.gemm import scales_of_part
from tests.modelled.traces import Traced, Tracer, operand

if TYPE_CHECKING:
    from examples.kernel_bench.layer import Shape
    from nvfp4_kernels.formats.terms import TermLayout
    from nvfp4_kernels.gemm.sm100.tile import EpilogueConfig, Tile

BYTES = 0.5 + 1 / 16  # per NVFP4 element, with its share of the scale
ELEMENT = 2  # bytes of a result


class ProductsSm100:
    """Products of one model's layer for one number of tokens.

    Args:
        tracer: tracer of ``"sm_100"``.
        shape: sizes of the model's layers.
        tokens: number of tokens of the batch.
        terms: number of NVFP4 terms of each token.
    """

    def __init__(self, tracer: Tracer, shape: "Shape", tokens: int, terms: int = 1) -> None:
        self._tracer = tracer
        self._shape = shape
        self._tokens = tokens
        self._terms = terms

    def product(
        self,
        name: str,
        read: str,
        written: str,
        quantizes: bool = False,
        most_turns: int | None = None,
    ) -> Traced:
        """Traced launch of a linear layer, or of gate and up projection with SiLU-mul.

        Args:
            name: ``"qkv_proj"``, ``"o_proj"``, ``"gate_up_proj"`` or ``"down_proj"``.
            read: name of the input.
            written: name of the result; L2 holds the result as though it were NVFP4 in any case.
            quantizes: whether the result is NVFP4 rather than in 16 bits.
            most_turns: maximum number of tiles per cluster; see ``turns``. None: no maximum.
        """
        import torch

        from nvfp4_kernels.formats.terms import ONE_TERM, data_shape, scales_shape
        from nvfp4_kernels.gemm.sm100.kernel import BlockScaledGemm, GemmArguments
        from nvfp4_kernels.runtime.compile import launch

        tile, output, clusters, turns = self._tiling(name, quantizes)
        n, k, weights = self._shape.product(name)
        down, across = _spans(tile)
        turns = min(turns, most_turns or turns)
        m, part = min(self._tokens, across), turns * down
        if not tile.swap_ab:
            m, part = min(self._tokens, down), turns * across

        def packed(height: int, terms: "TermLayout" = ONE_TERM) -> list[torch.Tensor]:
            data = torch.zeros(data_shape((), height, k, terms.count), dtype=torch.uint8)
            return [data, torch.zeros(scales_of_part(height, k, terms), dtype=torch.uint8)]

        x, matrices = packed(m, tile.terms), [packed(part) for _ in range(weights)]
        out = [torch.zeros(m, part, dtype=torch.bfloat16), None]
        if quantizes:
            shapes = data_shape((), m, part, 1), scales_shape((), m, part, 1)
            out = [torch.zeros(shape, dtype=torch.uint8) for shape in shapes]
        arguments = GemmArguments(
            x=x[0],
            sfx=x[1],
            w1=matrices[0][0],
            sfw1=matrices[0][1],
            w2=matrices[-1][0],
            sfw2=matrices[-1][1],
            out=out[0],
            sf_out=out[1],
            out_scale=torch.ones(1) if quantizes else None,
            alpha=torch.ones(2),
            row_scale=None,
            bias=None,
            groups=None,
            m=m,
            n=part,
            k=k,
            batch=1,
            weight_batch=1,
            clusters=1,
            defective_below=0,
            shard_ends=(0,) * 7,
        )
        traced, registers = self._tracer.run(
            lambda: launch(BlockScaledGemm(tile, output), arguments)
        )
        tokens = float(self._terms * self._tokens * k)
        operands = [
            operand(read, x[0], tokens / 2),
            operand(f"{read} scales", x[1], tokens / 16),
        ]
        for number, (data, scales) in enumerate(matrices):
            label = f"{name} {number}"
            operands.append(operand(label, data, n * k / 2))
            operands.append(operand(f"{label} scales", scales, n * k / 16))
        results = float(self._terms * self._tokens * n)
        writes = {written: results / 2, f"{written} scales": results / 16}
        return Traced(traced, clusters, tuple(operands), writes, registers)

    def turns(self, name: str, quantizes: bool = False) -> int:
        """Number of tiles that a cluster processes in turn."""
        return self._tiling(name, quantizes)[-1]

    def _tiling(self, name: str, quantizes: bool) -> "tuple[Tile, EpilogueConfig, int, int]":
        """Tile, epilogue, number of clusters, and number of tiles of the busiest cluster."""
        from nvfp4_kernels.devices import assumed_clusters
        from nvfp4_kernels.gemm.sm100.choose import Problem, choose_config
        from nvfp4_kernels.gemm.sm100.tile import EpilogueConfig
        from nvfp4_kernels.sm100.limits import SMS

        n, k, weights = self._shape.product(name)
        problem = Problem(self._tokens, n, k, weights=weights, terms=self._terms)
        wanted = EpilogueConfig("nvfp4" if quantizes else "bfloat16")
        tile, output = choose_config(problem, wanted)
        down, across = _spans(tile)
        rows, columns = (n, self._tokens) if tile.swap_ab else (self._tokens, n)
        total = math.ceil(rows / down) * math.ceil(columns / across)
        clusters = min(total, assumed_clusters(SMS, tile.cluster))
        return tile, output, clusters, math.ceil(total / clusters)


def _spans(tile: "Tile") -> tuple[int, int]:
    """Number of rows and number of columns that a cluster covers."""
    return tile.rows * max(1, tile.cluster_m // tile.ctas), tile.columns * tile.cluster_n
