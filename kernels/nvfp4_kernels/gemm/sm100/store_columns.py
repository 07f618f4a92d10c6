"""Stores for swap_ab: a thread has the values of one weight row for consecutive tokens."""

from dataclasses import dataclass

from cutlass import Float32, Int32, Int64, Uint16, Uint32, Vector
from cutlass.experimental import primitives as ptx

from nvfp4_kernels.device.pinned import pinned
from nvfp4_kernels.device.types import TYPES
from nvfp4_kernels.gemm.sm100.result import OutputTensor
from nvfp4_kernels.gemm.sm100.scheduler import TileCoord
from nvfp4_kernels.gemm.sm100.tile import EpilogueConfig


@dataclass(frozen=True)
class Row:
    """Column of the result D that one thread stores: one weight row, consecutive tokens.

    Attributes:
        first: address of the first token's element.
        n: stride between tokens, in elements.
        tokens: number of the result's tokens from the first token on; 0 past the last weight row.
    """

    first: Int64
    n: Int32
    tokens: Int32


@dataclass(frozen=True)
class ColumnStore:
    """Store of consecutive tokens of one weight row per thread; the lanes' stores coalesce.

    Values are stored straight from registers: staging through shared memory would take longer than
    the stores, which overlap with later math.
    """

    output: EpilogueConfig

    def row(self, result: OutputTensor, row: Int32, column: Int32, coord: TileCoord) -> Row:
        """``Row`` of weight row ``row`` from token ``column`` on; needs no accumulators."""
        index = (Int64(coord.batch) * result.m + column) * result.n + row
        left = Int32(row < result.n) * (result.m - column)
        first = result.data.toint() + index * self._size
        return Row(pinned(first), result.n, pinned(left))

    def from_token(self, row: Row, offset: Int32) -> Row:
        """Part of ``row`` from the ``offset``-th token on."""
        start = row.first + Int64(row.n) * (offset * self._size)
        return Row(start, row.n, row.tokens - offset)

    def put(self, row: Row, offset: int, values: list[Float32]) -> None:
        """Store float32 values of the tokens from ``offset`` on."""
        dtype = TYPES[self.output.dtype]
        word = Uint32 if dtype.width == 32 else Uint16
        converted = Vector.from_elements(tuple(values), Float32).to(dtype).bitcast(word)
        tokens = range(offset, offset + len(values))
        # All addresses before the first store, as nothing is reordered across a store; each
        # computed separately, as the compiler would otherwise chain 64-bit additions.
        addresses = [
            ptx.inline_ptx(
                f"mad.wide.u32 {{$w0}}, {{$r0}}, {token * self._size}, {{$r1}};",
                write_only_types=[Int64],
                read_only_args=[row.n, row.first],
            )
            for token in tokens
        ]
        live = [token < row.tokens for token in tokens]
        for index, (address, stored) in enumerate(zip(addresses, live, strict=True)):
            ptx.inline_ptx(
                f"@{{$r0}} st.global.b{dtype.width} [{{$r1}}], {{$r2}};",
                read_only_args=[stored, address, converted[index]],
            )

    @property
    def _size(self) -> int:
        """Bytes of an element."""
        return TYPES[self.output.dtype].width // 8
