"""Input rows of a dispatch, lookup of a row's token, and the source for existing tiles."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol

import cutlass
import cutlass.cute as cute
from cutlass import Array, Boolean, Float32, Int32, Int64, Uint32, Vector
from cutlass.experimental import primitives as ptx

from nvfp4_kernels.device.arguments import example


class Tokens(NamedTuple):
    """Input rows in global memory; part of kernels' arguments.

    Attributes:
        x: tokens [m, k], or rows in tiles [tiles, T, k].
        slots: int32 [tiles, T], slot of each row, -1 for padding; null if the launch sorts.
        weights: routing weights, float32 [m, top_k], or null.
    """

    x: cute.Pointer
    slots: cute.Pointer
    weights: cute.Pointer


class DispatchArguments(NamedTuple):
    """Arguments of a launch.

    Attributes:
        source: the source's arguments.
        tokens: rows to read.
        out: rows to write.
        ctas: number of CTAs of the grid; if existing tiles are quantised, number of CTAs for each
            of the parts into which rows are cut.
    """

    source: Any
    tokens: Tokens
    out: Any
    ctas: Int32


class DeviceSource(Protocol):
    """Device code of a source: slots of all rows, and the CTAs that process rows."""

    @property
    def tile_tokens(self) -> int:
        """Number of rows per token tile."""

    @property
    def cluster(self) -> int | None:
        """Number of CTAs per cluster; None: CTAs are independent."""

    @property
    def threads(self) -> int | None:
        """Number of threads per CTA; None: as in the layout of the rows."""

    def arguments(self) -> Any:
        """Example arguments of the source, for ``cute.compile``."""

    def place(self, source: Any, tokens: Tokens) -> tuple[Array, Callable[[], Int32]]:
        """Wait for preceding kernels; return the slots of all rows, and the number of tiles in use.

        The number is returned as a function, so that the caller decides when to load the number.
        """

    def workers(self, ctas: Int32) -> Int32:
        """Number of CTAs that process rows."""

    def finish(self) -> None:
        """Wait until no peer reads this CTA's shared memory."""


TOKEN_TYPES = {"slots": Int32, "weights": Float32}
TOKEN_ALIGNMENT = dict.fromkeys(TOKEN_TYPES, 4)


def load_count(groups: cute.Pointer) -> Int32:
    """Load the number of token tiles in use."""
    return Array(groups, shape=(1,)).load(0)


def load_slot(source: Array, row: Int64, there_is: Boolean | None = None) -> Int32:
    """Load the slot of a row; -1 if the row does not exist.

    ``there_is``: whether the row exists; None: the row always exists.
    """
    if there_is is None:
        return source.load(row)
    return ptx.inline_ptx(
        "mov.b32 {$w0}, -1; @{$r1} ld.global.b32 {$w0}, [{$r0}];",
        write_only_types=[Int32],
        read_only_args=[source.data_ptr(row), there_is],
    )


def load_vector(source: cute.Pointer, index: Int64, there_is: Boolean) -> Vector:
    """Load 16 bytes from element ``index`` on; return zeros if not ``there_is``."""
    words = ptx.inline_ptx(
        " ".join(f"mov.b32 {{$w{n}}}, 0;" for n in range(4))
        + " @{$r1} ld.global.v4.b32 {{$w0}, {$w1}, {$w2}, {$w3}}, [{$r0}];",
        write_only_types=[Uint32] * 4,
        read_only_args=[Array(source, shape=(1,)).data_ptr(index), there_is],
    )
    return Vector.from_elements(tuple(words), Uint32).bitcast(source.dtype)


def load_weight(source: cute.Pointer, slot: Int32) -> Float32:
    """Load the routing weight of a slot; 1 for padding, slot -1."""
    return ptx.inline_ptx(
        "mov.f32 {$w0}, 0f3F800000; @{$r1} ld.global.f32 {$w0}, [{$r0}];",
        write_only_types=[Float32],
        read_only_args=[Array(source, shape=(1,)).data_ptr(Int64(slot)), slot >= 0],
    )


def weigh(elements: Vector, weight: Float32) -> Vector:
    """Multiply elements by a routing weight in float32; round to the elements' dtype."""
    return (elements.to(Float32) * weight).to(elements.dtype)


def first_element(slot: Int32, row: Int64, top_k: cutlass.Constexpr, k: Int32 | int) -> Int64:
    """Offset in x of a row's token; if x is already in tiles (``top_k`` 0), of the row itself."""
    return (Int64(slot // top_k) if top_k else row) * Int64(k)


class TilesArguments(NamedTuple):
    """Existing tiles; part of a launch's arguments.

    Attributes:
        groups: int32; the first element is the number of token tiles in use.
    """

    groups: cute.Pointer


@dataclass(frozen=True)
class GivenTiles:
    """Source of a dispatch whose routing an earlier launch has written.

    Attributes:
        tile_tokens: rows per token tile.
    """

    tile_tokens: int

    cluster = threads = None

    def arguments(self) -> TilesArguments:
        """Example arguments of the source, for ``cute.compile``."""
        return example(TilesArguments, {"groups": Int32}, 4)

    def place(self, source: TilesArguments, tokens: Tokens) -> tuple[Array, Callable[[], Int32]]:
        """Wait for preceding kernels; return slots, and a function that loads the tile count."""
        ptx.griddepcontrol(ptx.GridDepAction.WAIT)
        return Array(tokens.slots, shape=(1,)), lambda: load_count(source.groups)

    def workers(self, ctas: Int32) -> Int32:
        """Number of CTAs that process rows."""
        return ctas

    def finish(self) -> None:
        """Return at once: no peer reads this CTA's shared memory."""
