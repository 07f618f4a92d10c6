"""The kernel, and the op's function that launches it."""

from dataclasses import dataclass
from typing import Any

import cuda.bindings.driver as cuda_driver
import cutlass
import cutlass.cute as cute
from cutlass import Array, Boolean, Float32, Int32, Int64, Uint64
from cutlass.cute.runtime import make_ptr
from cutlass.experimental import primitives as ptx
from torch import Tensor

from nvfp4_kernels.checks import InvalidArgument
from nvfp4_kernels.compile import launch
from nvfp4_kernels.devices import multiprocessors
from nvfp4_kernels.indexer.topk.choose import choose_config
from nvfp4_kernels.indexer.topk.guess import guess
from nvfp4_kernels.indexer.topk.keys import LEAST, MOST
from nvfp4_kernels.indexer.topk.result import Result, clear_bitmap, write
from nvfp4_kernels.indexer.topk.row import Row, find
from nvfp4_kernels.indexer.topk.select import narrow, settle
from nvfp4_kernels.indexer.topk.shared import OF_CLUSTER, TOTAL, Cta, clear, enter
from nvfp4_kernels.indexer.topk.stream import stream
from nvfp4_kernels.indexer.topk.tile import BATCH, MAX_COLUMNS, MAX_TIES, QUAD, Config


@dataclass(frozen=True)
class TopK:
    """One compiled variant.

    Attributes:
        config: how rows are cut.
        windows: whether rows have starts of their own.
        named: whether the result has other names for columns than their numbers.
    """

    config: Config
    windows: bool = False
    named: bool = False

    def __post_init__(self) -> None:
        assert self.config.buffer > BATCH

    def signature(self) -> tuple[Any, ...]:
        def pointer(dtype: type[cutlass.Numeric]) -> Any:
            return make_ptr(dtype, 4, cute.AddressSpace.gmem, assumed_align=4)

        return (
            pointer(Float32), *[pointer(Int32)] * 5, Int32(0), Int64(0), Int32(0)
        )  # fmt: skip

    @cute.jit
    def __call__(
        self,
        logits: cute.Pointer,
        names: cute.Pointer,
        lens: cute.Pointer,
        starts: cute.Pointer,
        indices: cute.Pointer,
        valid: cute.Pointer,
        rows: Int32,
        stride: Int64,
        top_k: Int32,
        stream: cuda_driver.CUstream,
    ) -> None:
        """Rows of ``logits`` and ``names`` lie ``stride`` elements apart.

        Without windows, starts are null; without names, those are.
        """
        self.kernel(logits, names, lens, starts, indices, valid, stride, top_k).launch(
            grid=(rows * self.config.cluster, 1, 1),
            block=(self.config.threads, 1, 1),
            cluster=(self.config.cluster, 1, 1),
            stream=stream,
            use_pdl=True,
        )

    @cute.kernel
    def kernel(
        self,
        logits: cute.Pointer,
        names: cute.Pointer,
        lens: cute.Pointer,
        starts: cute.Pointer,
        indices: cute.Pointer,
        valid: cute.Pointer,
        stride: Int64,
        top_k: Int32,
    ) -> None:
        cta = enter(self.config)
        index = cute.arch.block_idx()[0] // self.config.cluster
        ptx.griddepcontrol(ptx.GridDepAction.LAUNCH_DEPENDENTS)
        clear(cta)
        ptx.griddepcontrol(ptx.GridDepAction.WAIT)
        length = Array(lens, shape=(1,))[index]
        start = index * stride
        if cutlass.const_expr(self.windows):
            start += Array(starts, shape=(1,))[index]
        out = self._result(indices, names, index, start, top_k)
        if length <= top_k:
            self._choose_all(cta, out, length, top_k)
        else:
            self._choose(cta, find(cta, logits, start, length), out, top_k)
        if (cta.rank == 0) & (cta.thread == 0):
            Array(valid, shape=(1,)).store(cutlass.min(length, top_k), index)

    def _result(
        self, indices: cute.Pointer, names: cute.Pointer, row: Int32, start: Int64, top_k: Int32
    ) -> Result:
        out = Array(indices, shape=(1,)).subview(Int64(row) * top_k)
        return Result(out, Array(names, shape=(1,)).subview(start) if self.named else None)

    @cute.jit
    def _choose_all(self, cta: Cta, result: Result, length: Int32, top_k: Int32) -> None:
        first = cta.rank * self.config.threads + cta.thread
        for at in range(first, top_k, self.config.threads * self.config.cluster):
            if at < length:
                result.put(at, at)
            else:
                result.indices.store(Int32(-1), at)

    @cute.jit
    def _choose(self, cta: Cta, row: Row, result: Result, top_k: Int32) -> None:
        config = self.config
        low, hint = Uint64(LEAST), Uint64(MOST)
        if row.quads > config.cluster * config.buffer // QUAD:
            low, hint = guess(cta, row, top_k)
        high, need, within = Uint64(MOST), top_k, Int32(0)
        entries, turn = Int32(0), Int32(OF_CLUSTER[0])
        reading = Boolean(True)
        while reading:
            entries = stream(cta, row, low, top_k)
            low, high, need, within = narrow(
                cta, entries, low, Uint64(MOST), hint, top_k, turn, config.cluster
            )
            turn = sum(OF_CLUSTER) - turn
            # The guess was too high.
            reading = cta.shared.cells[TOTAL] < top_k
            if reading:
                low, hint = Uint64(LEAST), Uint64(MOST)
        while within > MAX_TIES:
            low, high, need, within = narrow(
                cta, entries, low, high, high, need, turn, config.cluster
            )
            turn = sum(OF_CLUSTER) - turn
        clear_bitmap(cta, row)
        least = settle(cta, entries, low, high, need, within, config.cluster)
        write(cta, row, entries, least, within, result)


def topk(logits: Tensor, lens: Tensor, top_k: int, starts: Tensor | None) -> tuple[Tensor, Tensor]:
    """See ``nvfp4_kernels.indexer.topk_op.indexer_topk``."""
    columns = logits.shape[1]
    if columns > MAX_COLUMNS:
        raise InvalidArgument(
            f"logits: has {columns} columns, must have at most {MAX_COLUMNS}; "
            "choose among parts of the rows, then among what was chosen"
        )
    return _topk(logits, None, lens, starts, top_k)


def topk_named(scores: Tensor, names: Tensor, lens: Tensor, top_k: int) -> tuple[Tensor, Tensor]:
    """The names of the best of each row, in the order of columns.

    Args:
        scores: float32 ``(rows, columns)``, contiguous, at most ``MAX_COLUMNS`` columns.
        names: int32, as many, contiguous.
        lens: int32 ``(rows,)``: elements of each row.
        top_k: names to choose.

    Returns:
        As ``indexer_topk``, with names in the place of indices.
    """
    return _topk(scores, names, lens, None, top_k)


def _topk(
    logits: Tensor, names: Tensor | None, lens: Tensor, starts: Tensor | None, top_k: int
) -> tuple[Tensor, Tensor]:
    rows, columns = logits.shape
    indices, valid = lens.new_empty((rows, top_k)), lens.new_empty((rows,))
    if rows:
        config = choose_config(rows, columns, top_k, multiprocessors(logits.device))
        kernel = TopK(config, windows=starts is not None, named=names is not None)
        stride = logits.stride(0)
        launch(kernel, logits, names, lens, starts, indices, valid, rows, stride, top_k)
    return indices, valid
