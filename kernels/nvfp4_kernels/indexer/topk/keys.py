"""Elements as integers: the greater the key, the better; no two elements of a row share one.

A key's upper half orders the values, its lower half prefers the lower column. −0 equals +0, and
NaN, which ``loaded`` has replaced, equals −inf.
"""

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32, Uint32, Uint64

LOWEST = float("-inf")
ANY_COLUMN = 0xFFFFFFFF
LEAST = 0x007FFFFF_00000000  # no key is less; of −inf
MOST = 0xFFFFFFFF_FFFFFFFF  # no key is greater


def known(value: Float32) -> Float32:
    """NaN as −inf: a maximum ignores NaN (PTX ISA, max)."""
    return cute.arch.fmax(value, Float32(LOWEST))


def ordered(value: Float32) -> Uint32:
    """Compares as the value does."""
    bits = (value + 0.0).bitcast(Int32)  # -0 + 0 is +0
    return (bits ^ ((bits >> 31) | Int32(-(1 << 31)))).bitcast(Uint32)


def value_of(order: Uint32) -> Float32:
    """The value that ``ordered`` maps to ``order``."""
    bits = order.bitcast(Int32)
    return (bits ^ (~(bits >> 31) | Int32(-(1 << 31)))).bitcast(Float32)


def value_before(order: Uint32) -> Float32:
    """The greatest value less than that of ``order``, which is not −inf."""
    before = order - 1
    # Of the two zeros, -0 comes before +0 but is no less.
    before = before - Uint32(cutlass.select_(before == Uint32(0x7FFFFFFF), Uint32(1), Uint32(0)))
    return value_of(before)


def key_of(value: Float32, column: Int32) -> Uint64:
    """Of an element."""
    return least_of(ordered(value)) | Uint64(~column.bitcast(Uint32))


def least_of(order: Uint32) -> Uint64:
    """The least key of that order."""
    return Uint64(order) << 32


def order_of(key: Uint64) -> Uint32:
    """The upper half."""
    return Uint32(key >> 32)


def column_of(key: Uint64) -> Uint32:
    """The column of an element, or, of a bound, the last column that it admits."""
    return ~Uint32(key)
