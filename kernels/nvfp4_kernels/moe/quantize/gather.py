"""The kernel of ``moe_gather`` on sm_90 and sm_100, and its launch."""

from dataclasses import dataclass
from typing import NamedTuple

import cuda.bindings.driver as cuda_driver
import cutlass
import cutlass.cute as cute
from cutlass import Array, Boolean, Int32, Int64, Uint32, Vector
from cutlass.experimental import primitives as ptx
from torch import Tensor

from nvfp4_kernels.checks import check_layout
from nvfp4_kernels.device.arguments import example
from nvfp4_kernels.device.types import TYPES
from nvfp4_kernels.devices import dtype_name, multiprocessors
from nvfp4_kernels.moe.quantize.choose import VECTOR_BYTES, GatherTile, choose_gather, ctas_of
from nvfp4_kernels.moe.quantize.tokens import (
    TOKEN_ALIGNMENT,
    TOKEN_TYPES,
    Tokens,
    first_element,
    load_count,
    load_slot,
    load_weight,
    weigh,
)
from nvfp4_kernels.moe.routing import Routing
from nvfp4_kernels.runtime.compile import launch


class MoeGatherArguments(NamedTuple):
    """Arguments of a launch.

    Attributes:
        groups: int32; the first element is the number of token tiles in use.
        tokens: rows to read.
        out: result [tiles, T, k].
        k: elements of a row.
        ctas: size of the grid.
    """

    groups: cute.Pointer
    tokens: Tokens
    out: cute.Pointer
    k: Int32
    ctas: Int32


@dataclass(frozen=True)
class GatheredRows:
    """Layout of the copied rows of token tiles.

    Attributes:
        dtype: ``"bfloat16"`` or ``"float16"``.
        tile: threads, and vectors per thread.
        top_k: slots of a token.
        weighted: whether the slots' routing weights are applied to the tokens.
    """

    dtype: str
    tile: GatherTile
    top_k: int
    weighted: bool

    @property
    def width(self) -> int:
        """Elements of a 16-byte load or store."""
        return 8 * VECTOR_BYTES // TYPES[self.dtype].width

    @property
    def part(self) -> int:
        """Elements of a row that a CTA copies in a turn."""
        return self.tile.threads * self.tile.steps * self.width

    def turns(self, rows: Int32, k: Int32) -> Int32:
        """Turns for ``rows`` rows."""
        return rows * cute.ceil_div(k, self.part)

    @cute.jit
    def copy(self, tokens: Tokens, slots: Array, k: Int32, out: cute.Pointer, turn: Int32) -> None:
        """Copy this thread's vectors of a turn; ``slots`` are the slots of all rows."""
        parts = cute.ceil_div(k, self.part)
        row, part = Int64(turn // parts), turn % parts
        slot = load_slot(slots, row)
        start = first_element(slot, row, self.top_k, k)
        elements = [
            part * self.part + (step * self.tile.threads + cute.arch.thread_idx()[0]) * self.width
            for step in range(self.tile.steps)
        ]
        vectors = [_load(tokens.x, start + at, (slot >= 0) & (at < k)) for at in elements]
        if cutlass.const_expr(self.weighted):
            weight = load_weight(tokens.weights, slot)
            vectors = [weigh(vector, weight) for vector in vectors]
        target = Array(out, shape=(1,)).subview(row * k)
        for step in cutlass.range_constexpr(self.tile.steps):
            if elements[step] < k:
                target.store(vectors[step], elements[step], alignment=VECTOR_BYTES)


def _load(source: cute.Pointer, index: Int64, there_is: Boolean) -> Vector:
    """16 bytes from an element on; zeros if absent."""
    words = ptx.inline_ptx(
        " ".join(f"mov.b32 {{$w{n}}}, 0;" for n in range(4))
        + " @{$r1} ld.global.v4.b32 {{$w0}, {$w1}, {$w2}, {$w3}}, [{$r0}];",
        write_only_types=[Uint32] * 4,
        read_only_args=[Array(source, shape=(1,)).data_ptr(index), there_is],
    )
    return Vector.from_elements(tuple(words), Uint32).bitcast(source.dtype)


@dataclass(frozen=True)
class MoeGather:
    """Copy of tokens to the rows of tiles in use; padding rows are zeros.

    A CTA takes turns, each a row or a part of one, until the tiles in use are done.

    Attributes:
        rows: layout of the copied rows.
        tile_tokens: rows of a token tile.
    """

    rows: GatheredRows
    tile_tokens: int

    def signature(self) -> tuple[MoeGatherArguments]:
        """Example of ``__call__``'s arguments."""
        types = {"x": TYPES[self.rows.dtype], "out": TYPES[self.rows.dtype], **TOKEN_TYPES}
        return (example(MoeGatherArguments, types, TOKEN_ALIGNMENT),)

    @cute.jit
    def __call__(self, arguments: MoeGatherArguments, stream: cuda_driver.CUstream) -> None:
        """Launch a persistent grid."""
        self.kernel(arguments).launch(
            grid=(arguments.ctas, 1, 1),
            block=(self.rows.tile.threads, 1, 1),
            stream=stream,
            use_pdl=True,
        )

    @cute.kernel
    def kernel(self, arguments: MoeGatherArguments) -> None:
        """Copy rows turn by turn."""
        ptx.griddepcontrol(ptx.GridDepAction.LAUNCH_DEPENDENTS)
        ptx.griddepcontrol(ptx.GridDepAction.WAIT)
        rows = load_count(arguments.groups) * self.tile_tokens
        self._take_turns(arguments, self.rows.turns(rows, arguments.k))

    @cute.jit
    def _take_turns(self, arguments: MoeGatherArguments, turns: Int32) -> None:
        slots = Array(arguments.tokens.slots, shape=(1,))
        for turn in range(cute.arch.block_idx()[0], turns, arguments.ctas):
            self.rows.copy(arguments.tokens, slots, arguments.k, arguments.out, turn)


def moe_gather(x: Tensor, routing: Routing, topk_weights: Tensor | None) -> Tensor:
    """See ``nvfp4_kernels.moe.quantize.op.moe_gather``."""
    check_layout("x", x)
    check_layout("topk_weights", topk_weights)
    for name, part in routing._asdict().items():
        check_layout(f"routing.{name}", part)
    tiles, tile_tokens = routing.slots.shape
    k = x.shape[1]
    out = x.new_empty((tiles, tile_tokens, k))
    if out.numel():
        rows = gathered_rows(x, routing.top_k, topk_weights)
        turns = tiles * tile_tokens * -(-k // rows.part)
        arguments = MoeGatherArguments(
            groups=routing.groups,
            tokens=Tokens(x, routing.slots, topk_weights),
            out=out,
            k=k,
            ctas=ctas_of(turns, rows.tile.threads, multiprocessors(x.device)),
        )
        launch(MoeGather(rows, tile_tokens), arguments)
    return out


def gathered_rows(x: Tensor, top_k: int, topk_weights: Tensor | None) -> GatheredRows:
    """Layout of a batch's rows."""
    tile = choose_gather(x.shape[1] * x.element_size())
    return GatheredRows(dtype_name(x.dtype), tile, top_k, topk_weights is not None)
