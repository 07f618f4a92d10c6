"""``moe_quantize`` and ``moe_quantize_per_token`` for sm_100: tokens to rows of token tiles."""

from dataclasses import dataclass
from typing import NamedTuple

import cuda.bindings.driver as cuda_driver
import cutlass
import cutlass.cute as cute
import torch
from cutlass import Array, Int32, Vector
from cutlass.experimental import primitives as ptx
from torch import Tensor

from nvfp4_kernels.checks import check_layout
from nvfp4_kernels.compile import launch
from nvfp4_kernels.device.arguments import example
from nvfp4_kernels.device.rowwise.operands import ALIGNMENT, check_aligned
from nvfp4_kernels.device.rowwise.output import (
    OUTPUT_ALIGNMENT,
    OUTPUT_TYPES,
    QuantizedRows,
    RowQuantizer,
)
from nvfp4_kernels.device.rowwise.place import (
    Place,
    find,
    find_in_lines,
    load_block,
    store_padding,
)
from nvfp4_kernels.device.rowwise.tile import RowTile
from nvfp4_kernels.device.types import TYPES
from nvfp4_kernels.devices import dtype_name, multiprocessors
from nvfp4_kernels.moe_quantize.choose import LINES, choose_config, ctas_of, turns_of_tile
from nvfp4_kernels.moe_quantize.op import new_tiles
from nvfp4_kernels.moe_quantize.tokens import (
    TOKEN_ALIGNMENT,
    TOKEN_TYPES,
    Tokens,
    first_element,
    load_count,
    load_slot,
    load_weight,
    weigh,
)
from nvfp4_kernels.routing import Routing
from nvfp4_kernels.terms import ONE_TERM, TermLayout


class MoeQuantizeArguments(NamedTuple):
    """Arguments of a launch.

    Attributes:
        groups: int32, the number of token tiles in use first.
        tokens: rows to read.
        out: rows to write.
        turns: CTAs' turns that one token tile takes.
        ctas: size of the grid.
    """

    groups: cute.Pointer
    tokens: Tokens
    out: QuantizedRows
    turns: Int32
    ctas: Int32


@dataclass(frozen=True)
class MoeRows:
    """Layout of the rows of token tiles, and where a thread finds and leaves them.

    Attributes:
        dtype: of the input, e.g. ``"bfloat16"``.
        per_token: whether a row's global scale is its own.
        tile: rows and threads.
        tile_tokens: rows of a token tile.
        top_k: slots of a token; 0: rows lie in tiles already.
        weighted: whether tokens are multiplied by their slots' weights.
        terms: of the result.
    """

    dtype: str
    per_token: bool
    tile: RowTile
    tile_tokens: int
    top_k: int
    weighted: bool
    terms: TermLayout = ONE_TERM

    def place(self, out: QuantizedRows, turn: Int32) -> Place:
        """This thread's place in a turn."""
        of_turn = find_in_lines if self.tile_tokens <= LINES else find
        return of_turn(self.tile, self.tile_tokens, out.k, self.terms, turn)

    def write(
        self, tokens: Tokens, slots: Array, first_row: Int32 | int, out: QuantizedRows, place: Place
    ) -> None:
        """Quantise one CTA's rows; ``slots`` are those of rows from ``first_row`` on."""
        slot = self._slot(slots, place, first_row)
        quantizer = RowQuantizer(out.data, out.scales, out.scale, self.per_token)
        quantizer.write(place, self._rows(tokens, out.k, slot, place))

    def _slot(self, slots: Array, place: Place, first_row: Int32 | int) -> Int32:
        return load_slot(slots, place.row - first_row, None if place.line_rows else place.inside)

    def _rows(self, tokens: Tokens, k: Int32, slot: Int32, place: Place) -> list[Vector]:
        start = first_element(slot, place.row, self.top_k, k)
        is_slot = slot >= 0
        blocks = [
            load_block(
                tokens.x, start + place.element(s), place.has(s) & is_slot, streamed=not self.top_k
            )
            for s in place.steps
        ]
        if not self.weighted:
            return blocks
        weight = load_weight(tokens.weights, slot)
        return [weigh(block, weight) for block in blocks]


@dataclass(frozen=True)
class MoeQuantizeSm100:
    """Quantisation of the rows of tiles in use; a row of padding is one of zeros.

    A CTA takes turns, each some rows of a tile, until the tiles in use are done: their number is
    read on the device, and memory for the worst batch costs nothing.

    Attributes:
        rows: their layout.
    """

    rows: MoeRows

    def signature(self) -> tuple[MoeQuantizeArguments]:
        """Example of ``__call__``'s arguments."""
        types = {"x": TYPES[self.rows.dtype], **TOKEN_TYPES, **OUTPUT_TYPES}
        alignment = {"x": ALIGNMENT, **TOKEN_ALIGNMENT, **OUTPUT_ALIGNMENT}
        return (example(MoeQuantizeArguments, types, alignment),)

    @cute.jit
    def __call__(self, arguments: MoeQuantizeArguments, stream: cuda_driver.CUstream) -> None:
        """Launch a persistent grid."""
        self.kernel(arguments).launch(
            grid=(arguments.ctas, 1, 1),
            block=(self.rows.tile.threads, 1, 1),
            stream=stream,
            use_pdl=True,
        )

    @cute.kernel
    def kernel(self, arguments: MoeQuantizeArguments) -> None:
        """Quantise rows turn by turn, or zero the scales of padding."""
        ptx.griddepcontrol(ptx.GridDepAction.LAUNCH_DEPENDENTS)
        ptx.griddepcontrol(ptx.GridDepAction.WAIT)
        self._take_turns(arguments, load_count(arguments.groups) * arguments.turns)

    @cute.jit
    def _take_turns(self, arguments: MoeQuantizeArguments, turns: Int32) -> None:
        out, slots = arguments.out, Array(arguments.tokens.slots, shape=(1,))
        for turn in range(cute.arch.block_idx()[0], turns, arguments.ctas):
            place = self.rows.place(out, turn)
            if place.live:
                self.rows.write(arguments.tokens, slots, 0, out, place)
            else:
                store_padding(place, out.scales)
            if cutlass.const_expr(self.rows.per_token):
                ptx.barrier_cta_sync()  # shared memory is that of the next turn, too


def moe_quantize(
    x: Tensor, routing: Routing, global_scale: Tensor, topk_weights: Tensor | None, terms: int
) -> tuple[Tensor, Tensor]:
    """See ``nvfp4_kernels.moe_quantize.op.moe_quantize``."""
    return _run(x, routing, global_scale, topk_weights, False, terms)


def moe_quantize_per_token(
    x: Tensor, routing: Routing, topk_weights: Tensor | None, terms: int
) -> tuple[Tensor, Tensor, Tensor]:
    """See ``nvfp4_kernels.moe_quantize.op.moe_quantize_per_token``."""
    row_scale = x.new_empty(routing.slots.shape, dtype=torch.float32)
    return (*_run(x, routing, row_scale, topk_weights, True, terms), row_scale)


def _run(
    x: Tensor,
    routing: Routing,
    scale: Tensor,
    topk_weights: Tensor | None,
    per_token: bool,
    terms: int,
) -> tuple[Tensor, Tensor]:
    check_tokens(x, topk_weights)
    for name, part in routing._asdict().items():
        check_layout(f"routing.{name}", part)
    data, scales = new_tiles(x, routing.slots, terms)
    if data.numel():
        rows = rows_of(x, routing, topk_weights, per_token, terms)
        tiles, sms = len(routing.slots), multiprocessors(x.device)
        turns = turns_of_tile(rows.tile, rows.tile_tokens, x.shape[-1])
        arguments = MoeQuantizeArguments(
            groups=routing.groups,
            tokens=Tokens(x, routing.slots, topk_weights),
            out=QuantizedRows(data, scales, scale, rows.tile_tokens, x.shape[-1], tiles),
            turns=turns,
            ctas=ctas_of(tiles * turns, rows.tile.threads, sms),
        )
        launch(MoeQuantizeSm100(rows), arguments)
    return data, scales


def check_tokens(x: Tensor, topk_weights: Tensor | None) -> None:
    """Raise unless kernels can read tokens and weights."""
    check_layout("x", x)
    check_aligned("x", x)
    check_layout("topk_weights", topk_weights)


def rows_of(
    x: Tensor, routing: Routing, topk_weights: Tensor | None, per_token: bool, terms: int
) -> MoeRows:
    """Layout for a batch; as many rows are expected in use as it has slots."""
    tile_tokens = routing.tile_tokens
    sms = multiprocessors(x.device)
    tile = choose_config(routing.rows.numel(), x.shape[-1], x.element_size(), per_token, sms)
    return MoeRows(
        dtype=dtype_name(x.dtype),
        per_token=per_token,
        tile=tile,
        tile_tokens=tile_tokens,
        top_k=routing.top_k if x.ndim == 2 else 0,
        weighted=topk_weights is not None,
        terms=TermLayout.of(terms, tile_tokens),
    )
