"""Sink of a dispatch with quantisation, for sm_100: tokens become NVFP4 rows of token tiles."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple

import cutlass
import cutlass.cute as cute
from cutlass import Array, Boolean, Int32, Vector
from cutlass.experimental import primitives as ptx

from nvfp4_kernels.device.arguments import example
from nvfp4_kernels.device.rowwise.operands import ALIGNMENT
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
from nvfp4_kernels.formats.terms import ONE_TERM, TermLayout
from nvfp4_kernels.moe.dispatch.choose import LINES, columns_of_row, groups_of_tile
from nvfp4_kernels.moe.dispatch.tokens import (
    TOKEN_ALIGNMENT,
    TOKEN_TYPES,
    DeviceSource,
    DispatchArguments,
    GivenTiles,
    Tokens,
    first_element,
    load_slot,
    load_weight,
    weigh,
)


class QuantizedItems(NamedTuple):
    """Output rows of a launch that sorts; part of the launch's arguments.

    Attributes:
        rows: data and scales.
        items: number of work items per token tile.
    """

    rows: QuantizedRows
    items: Int32


@dataclass(frozen=True)
class MoeRows:
    """Quantised tokens in rows of token tiles: layout, and a thread's reads and writes.

    Attributes:
        dtype: dtype of the input, e.g. ``"bfloat16"``.
        per_token: whether each row has its own global scale.
        tile: layout of threads over rows.
        tile_tokens: rows per token tile.
        k: elements per row, a compile-time constant, so that a thread locates blocks in few
            instructions.
        top_k: slots per token; 0: rows are already in tiles.
        weighted: whether the slots' routing weights are applied to the tokens.
        terms: layout of the result's NVFP4 terms.
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
        """Number of parts into which rows are cut."""
        return columns_of_row(self.tile, self.k)

    def place(self, column: Int32, group: Int32, thread: Int32 | None = None) -> Place:
        """``Place`` of a thread in the work item of part ``column`` and row group ``group``.

        ``thread``: see ``find_at``.
        """
        found = find_in_lines if self.tile_tokens <= LINES else find_at
        return found(self.tile, self.tile_tokens, self.k, self.terms, column, group, thread)

    def slot(self, slots: Array, place: Place, there_is: Boolean | None = None) -> Int32:
        """Load the slot of this thread's row from ``slots``, the slots of all rows.

        ``there_is``: whether this CTA has a work item; None if the CTA always has one.
        """
        if not place.line_rows:
            there_is = place.inside if there_is is None else there_is & place.inside
        return load_slot(slots, place.row, there_is)

    @cute.jit
    def write(self, tokens: Tokens, slot: Int32, out: QuantizedRows, place: Place) -> None:
        """Quantise the rows of a work item, or write zeros in warps with padding rows only.

        ``slot``: slot of this thread's row.
        """
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

    def arguments(self, source: DeviceSource) -> QuantizedRows | QuantizedItems:
        """Example of the output rows; unless tiles exist already, with the number of work items."""
        rows = example(QuantizedRows, OUTPUT_TYPES, OUTPUT_ALIGNMENT)
        return rows if isinstance(source, GivenTiles) else QuantizedItems(rows, Int32(0))

    def tokens(self) -> Tokens:
        """Example of the rows to read, for ``cute.compile``."""
        types = {"x": TYPES[self.dtype], **TOKEN_TYPES}
        return example(Tokens, types, {"x": ALIGNMENT, **TOKEN_ALIGNMENT})

    def grid(self, source: DeviceSource, ctas: Int32) -> tuple[Int32 | int, ...]:
        """Extent of the grid."""
        return (self.columns, ctas, 1) if isinstance(source, GivenTiles) else (ctas, 1, 1)

    def take_turns(
        self,
        source: DeviceSource,
        arguments: DispatchArguments,
        slots: Array,
        used: Callable[[], Int32],
    ) -> None:
        """Quantise the rows of ``used()`` tiles.

        A CTA loops over work items, each a part of some rows of a tile, until all tiles in use are
        done. The number of tiles is read on the device, so that unused tiles, allocated for the
        worst case, cost no time. Neighbouring CTAs have parts of the same rows, so that SMs are
        evenly loaded when few tiles are in use. ``slots``: slots of all rows.
        """
        if isinstance(source, GivenTiles):
            column, first, _ = cute.arch.block_idx()
            count = used()
            # Before the count is there: memory has room for the first item of every CTA.
            slot = self.slot(slots, self.place(column, first))
            groups = count * groups_of_tile(self.tile, self.tile_tokens)
            self._run_items_of_tiles(arguments, slots, slot, groups)
        else:
            teams = None if source.threads is None else source.threads // self.tile.threads
            items = used() * arguments.out.items
            self._run_items(arguments, slots, items, source.workers(arguments.ctas), teams)

    @cute.jit
    def _run_items_of_tiles(
        self, arguments: DispatchArguments, slots: Array, slot: Int32, groups: Int32
    ) -> None:
        """Quantise the CTA's work items in existing tiles.

        Args:
            arguments: arguments of the launch.
            slots: slots of all rows.
            slot: slot of this thread's row in the CTA's first work item.
            groups: number of row groups in all tiles in use.
        """
        out = arguments.out
        column, first, _ = cute.arch.block_idx()
        for group in range(first, groups, arguments.ctas):
            place, following = self.place(column, group), group + arguments.ctas
            # Loaded before this item waits for the rows' loads.
            next_slot = self.slot(slots, self.place(column, following), following < groups)
            if place.live:
                self.write(arguments.tokens, slot, out, place)
            else:
                store_padding(place, out.scales)
            slot = next_slot
            if cutlass.const_expr(self.per_token):
                ptx.barrier_cta_sync()  # shared memory is that of the next item, too

    @cute.jit
    def _run_items(
        self,
        arguments: DispatchArguments,
        slots: Array,
        items: Int32,
        workers: Int32,
        teams: cutlass.Constexpr,
    ) -> None:
        """Quantise a share of ``items`` work items, spread over ``workers`` CTAs.

        ``teams``: number of teams of threads per CTA, each with items of its own; None: no teams.
        """
        out, columns, size = arguments.out.rows, self.columns, self.tile.threads
        first, step, thread = cute.arch.block_idx()[0], workers, None
        if cutlass.const_expr(teams is not None):
            in_cta = cute.arch.thread_idx()[0]
            first, step, thread = first + in_cta // size * workers, workers * teams, in_cta % size
        for item in range(first, items, step):
            place = self.place(item % columns, item // columns, thread)
            slot = Int32(-1)
            if place.inside:
                slot = slots[place.row]
            if place.live:
                self.write(arguments.tokens, slot, out, place)
            else:
                store_padding(place, out.scales)
            if cutlass.const_expr(self.per_token):
                ptx.barrier_cta_sync()  # shared memory is that of the next item, too
