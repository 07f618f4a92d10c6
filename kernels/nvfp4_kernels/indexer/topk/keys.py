"""Sort keys of elements: a greater key is better; elements of a row have distinct keys.

A key's upper half orders elements by value; the lower half prefers the lower column among equal
values. −0 equals +0, and NaN, replaced by ``nan_to_lowest``, equals −inf.
"""

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32, Uint32, Uint64

LOWEST = float("-inf")
ANY_COLUMN = 0xFFFFFFFF
MIN_KEY = 0x007FFFFF_00000000  # lower bound on all keys: that of −inf
MAX_KEY = 0xFFFFFFFF_FFFFFFFF  # upper bound on all keys


def nan_to_lowest(value: Float32) -> Float32:
    """Replace NaN with −inf, by the maximum with −inf, which ignores NaN (PTX ISA, max)."""
    return cute.arch.fmax(value, Float32(LOWEST))


def order_bits(value: Float32) -> Uint32:
    """Unsigned integer of a value, in the same order as the values; equal for −0 and +0."""
    bits = (value + 0.0).bitcast(Int32)  # -0 + 0 is +0
    return (bits ^ ((bits >> 31) | Int32(-(1 << 31)))).bitcast(Uint32)


def value_of(order: Uint32) -> Float32:
    """Value that ``order_bits`` maps to ``order``."""
    bits = order.bitcast(Int32)
    return (bits ^ (~(bits >> 31) | Int32(-(1 << 31)))).bitcast(Float32)


def value_before(order: Uint32) -> Float32:
    """Greatest value less than ``value_of(order)``; NaN if ``value_of(order)`` is −inf."""
    before = order - 1
    # -0 comes before +0 in the order of bits, but is not less.
    before = before - Uint32(cutlass.select_(before == Uint32(0x7FFFFFFF), Uint32(1), Uint32(0)))
    return value_of(before)


def key_of(value: Float32, column: Int32) -> Uint64:
    """Key of an element, given by value and column."""
    return min_key(order_bits(value)) | Uint64(~column.bitcast(Uint32))


def min_key(order: Uint32) -> Uint64:
    """Least key of any element whose value has the order bits ``order``."""
    return Uint64(order) << 32


def order_of(key: Uint64) -> Uint32:
    """Order bits of a key, its upper half."""
    return Uint32(key >> 32)


def column_of(key: Uint64) -> Uint32:
    """Column of a key's element; for a threshold, the last column at which equal values pass."""
    return ~Uint32(key)
