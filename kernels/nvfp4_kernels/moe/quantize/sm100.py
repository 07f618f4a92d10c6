"""``moe_quantize`` and ``moe_quantize_per_token`` for sm_100: tokens to rows of token tiles."""

from dataclasses import dataclass
from typing import NamedTuple

import cuda.bindings.driver as cuda_driver
import cutlass
import cutlass.cute as cute
import torch
from cutlass import Array, Boolean, Int32, Vector
from cutlass.experimental import primitives as ptx
from torch import Tensor

from nvfp4_kernels.checks import check_layout
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
    find_at,
    find_in_lines,
    load_block,
    store_padding,
)
from nvfp4_kernels.device.rowwise.tile import RowTile
from nvfp4_kernels.device.types import TYPES
from nvfp4_kernels.devices import dtype_name, multiprocessors
from nvfp4_kernels.formats.terms import ONE_TERM, TermLayout
from nvfp4_kernels.moe.quantize.choose import (
    LINES,
    choose_config,
    columns_of_row,
    ctas_of,
    groups_of_tile,
)
from nvfp4_kernels.moe.quantize.op import new_tiles
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


class MoeQuantizeArguments(NamedTuple):
    """Arguments of a launch.

    Attributes:
        groups: int32; the first element is the number of token tiles in use.
        tokens: rows to read.
        out: rows to write.
        ctas: CTAs that share the groups of rows, per part of a row.
    """

    groups: cute.Pointer
    tokens: Tokens
    out: QuantizedRows
    ctas: Int32


@dataclass(frozen=True)
class MoeRows:
    """Layout of the rows of token tiles, and a thread's reads and writes.

    Attributes:
        dtype: dtype of the input, e.g. ``"bfloat16"``.
        per_token: whether each row has its own global scale.
        tile: rows and threads.
        tile_tokens: rows of a token tile.
        k: elements of a row, a compile-time constant of the layer: a thread then finds its block in
            few instructions, at every turn.
        top_k: slots of a token; 0: rows are already in tiles.
        weighted: whether the slots' routing weights are applied to the tokens.
        terms: NVFP4 terms of the result.
    """

    dtype: str
    per_token: bool
    tile: RowTile
    tile_tokens: int
    k: int
    top_k: int
    weighted: bool
    terms: TermLayout = ONE_TERM

    @property
    def columns(self) -> int:
        """Number of CTAs that share a row."""
        return columns_of_row(self.tile, self.k)

    def place(self, column: Int32, group: Int32, thread: Int32 | None = None) -> Place:
        """``Place`` of a thread in a part of some rows; ``thread``: see ``find_at``."""
        found = find_in_lines if self.tile_tokens <= LINES else find_at
        return found(self.tile, self.tile_tokens, self.k, self.terms, column, group, thread)

    def slot(self, slots: Array, place: Place, there_is: Boolean | None = None) -> Int32:
        """Slot of this thread's row; ``slots`` are the slots of all rows.

        ``there_is`` None: the turn certainly belongs to this CTA.
        """
        if not place.line_rows:
            there_is = place.inside if there_is is None else there_is & place.inside
        return load_slot(slots, place.row, there_is)

    @cute.jit
    def write(self, tokens: Tokens, slot: Int32, out: QuantizedRows, place: Place) -> None:
        """Quantise one CTA's rows; ``slot`` is the slot of this thread's row."""
        quantizer = RowQuantizer(out.data, out.scales, out.scale, self.per_token)
        if cutlass.const_expr(self.per_token) or cute.arch.vote_any_sync(slot >= 0):
            quantizer.write(place, self._rows(tokens, slot, place))
        else:  # a tile's last rows are often padding: a third of a batch's
            quantizer.write_zeros(place)

    def _rows(self, tokens: Tokens, slot: Int32, place: Place) -> list[Vector]:
        start = first_element(slot, place.row, self.top_k, self.k)
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
    """Quantisation of the rows of tiles in use; padding rows are zeros.

    A CTA takes turns, each a part of some rows of a tile, until all tiles in use are done: the
    number of tiles is read on the device, so that memory for the worst case costs no time. CTAs of
    the same rows are neighbours, so that SMs are evenly loaded when few tiles are in use.

    Attributes:
        rows: layout of the rows.
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
            grid=(self.rows.columns, arguments.ctas, 1),
            block=(self.rows.tile.threads, 1, 1),
            stream=stream,
            use_pdl=True,
        )

    @cute.kernel
    def kernel(self, arguments: MoeQuantizeArguments) -> None:
        """Quantise rows turn by turn, or zero the scales of padding."""
        ptx.griddepcontrol(ptx.GridDepAction.LAUNCH_DEPENDENTS)
        ptx.griddepcontrol(ptx.GridDepAction.WAIT)
        slots = Array(arguments.tokens.slots, shape=(1,))
        column, first, _ = cute.arch.block_idx()
        count = load_count(arguments.groups)
        # Before the count is there: memory has room for the first turn of every CTA.
        slot = self.rows.slot(slots, self.rows.place(column, first))
        groups = count * groups_of_tile(self.rows.tile, self.rows.tile_tokens)
        self._take_turns(arguments, slots, slot, groups)

    @cute.jit
    def _take_turns(
        self, arguments: MoeQuantizeArguments, slots: Array, slot: Int32, groups: Int32
    ) -> None:
        """Quantise rows in turns; ``slot`` is the slot of this thread's row in the first turn."""
        out = arguments.out
        column, first, _ = cute.arch.block_idx()
        for group in range(first, groups, arguments.ctas):
            place, following = self.rows.place(column, group), group + arguments.ctas
            # Loaded before this turn waits for the rows' loads.
            next_slot = self.rows.slot(
                slots, self.rows.place(column, following), following < groups
            )
            if place.live:
                self.rows.write(arguments.tokens, slot, out, place)
            else:
                store_padding(place, out.scales)
            slot = next_slot
            if cutlass.const_expr(self.rows.per_token):
                ptx.barrier_cta_sync()  # shared memory is that of the next turn, too


def moe_quantize(
    x: Tensor, routing: Routing, global_scale: Tensor, topk_weights: Tensor | None, terms: int
) -> tuple[Tensor, Tensor]:
    """See ``nvfp4_kernels.moe.quantize.op.moe_quantize``."""
    return _run(x, routing, global_scale, topk_weights, False, terms)


def moe_quantize_per_token(
    x: Tensor, routing: Routing, topk_weights: Tensor | None, terms: int
) -> tuple[Tensor, Tensor, Tensor]:
    """See ``nvfp4_kernels.moe.quantize.op.moe_quantize_per_token``."""
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
        rows = rows_of(x, routing.rows.shape, routing.tile_tokens, topk_weights, per_token, terms)
        tiles, sms = len(routing.slots), multiprocessors(x.device)
        groups = tiles * groups_of_tile(rows.tile, rows.tile_tokens)
        ctas = ctas_of(groups * rows.columns, rows.tile.threads, sms)
        arguments = MoeQuantizeArguments(
            groups=routing.groups,
            tokens=Tokens(x, routing.slots, topk_weights),
            out=QuantizedRows(data, scales, scale, rows.tile_tokens, x.shape[-1], tiles),
            ctas=-(-ctas // rows.columns),
        )
        launch(MoeQuantizeSm100(rows), arguments)
    return data, scales


def check_tokens(x: Tensor, topk_weights: Tensor | None) -> None:
    """Raise unless kernels can read tokens and routing weights."""
    check_layout("x", x)
    check_aligned("x", x)
    check_layout("topk_weights", topk_weights)


def rows_of(
    x: Tensor,
    slots: tuple[int, ...],
    tile_tokens: int,
    topk_weights: Tensor | None,
    per_token: bool,
    terms: int,
) -> MoeRows:
    """Layout for slots ``(M, k)``, whose number is also the expected number of rows in use."""
    count, sms = slots[0] * slots[1], multiprocessors(x.device)
    return MoeRows(
        dtype=dtype_name(x.dtype),
        per_token=per_token,
        tile=choose_config(count, x.shape[-1], x.element_size(), per_token, sms),
        tile_tokens=tile_tokens,
        k=x.shape[-1],
        top_k=slots[1] if x.ndim == 2 else 0,
        weighted=topk_weights is not None,
        terms=TermLayout.of(terms, tile_tokens),
    )
