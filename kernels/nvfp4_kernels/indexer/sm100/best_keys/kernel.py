"""The scoring kernel that keeps the best keys."""

from dataclasses import dataclass
from typing import Any

import cuda.bindings.driver as cuda_driver
import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32, Int64
from cutlass.cute.runtime import make_ptr

from nvfp4_kernels.indexer.sm100.best_keys.candidates import Output
from nvfp4_kernels.indexer.sm100.best_keys.consumer import BestKeys
from nvfp4_kernels.indexer.sm100.best_keys.tile import Selection
from nvfp4_kernels.indexer.sm100.kernel import ScorerSm100
from nvfp4_kernels.indexer.sm100.operands import Pages
from nvfp4_kernels.indexer.sm100.scheduler import Ranges, Sizes
from nvfp4_kernels.indexer.sm100.weights import Weights


@dataclass(frozen=True)
class BestKeysSm100(ScorerSm100):
    """One compiled variant."""

    selection: Selection

    def __post_init__(self) -> None:
        assert self.tile.consumer_bytes >= self.selection.shared_bytes(self.tile)

    @property
    def consumer(self) -> BestKeys:
        return BestKeys(self.tile, self.variant, self.selection)

    def signature(self) -> tuple[Any, ...]:
        """That of the scoring kernel, with what ``Output`` has in the place of the logits."""

        def pointer(dtype: type[cutlass.Numeric]) -> Any:
            return make_ptr(dtype, 16, cute.AddressSpace.gmem, assumed_align=4)

        *operands, _ = ScorerSm100.signature(self)[:10]
        sizes = ScorerSm100.signature(self)[10:]
        return (
            *operands, pointer(Float32), pointer(Int32), pointer(Int32), Int32(0), Int32(0), *sizes
        )  # fmt: skip

    @cute.jit
    def __call__(
        self,
        q: cute.Pointer,
        q_scales: cute.Pointer,
        k: cute.Pointer,
        k_scales: cute.Pointer,
        weights: cute.Pointer,
        query_factors: cute.Pointer,
        begins: cute.Pointer,
        ends: cute.Pointer,
        table: cute.Pointer,
        scores: cute.Pointer,
        keys: cute.Pointer,
        counts: cute.Pointer,
        stride: Int32,
        top_k: Int32,
        page_stride: Int64,
        pages: Int32,
        table_stride: Int32,
        sequences: Int32,
        queries: Int32,
        columns: Int32,
        splits: Int32,
        stream: cuda_driver.CUstream,
    ) -> None:
        """As the scoring kernel's; ``scores`` to ``top_k`` are as in ``Output``."""
        out = Output(scores, keys, counts, stride, top_k)
        sizes = Sizes(sequences, queries, columns, splits, self.consumer.least(out))
        pages_of = Pages(table, table_stride, pages, page_stride, k_scales)
        weights_of = Weights(weights, query_factors)
        self.start(q, q_scales, k, pages_of, weights_of, Ranges(begins, ends), out, sizes, stream)
