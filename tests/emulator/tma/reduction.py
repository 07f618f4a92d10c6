"""Arithmetic of cp.reduce.async.bulk and cp.reduce.async.bulk.tensor."""

from collections.abc import Callable
from typing import Any

import ml_dtypes
import numpy as np
import numpy.typing as npt

from tests.emulator.findings import IllegalInstruction

Bytes = npt.NDArray[np.uint8]
Items = npt.NDArray[Any]

# PTX ISA 9.7.9.25.4.2, table of operations and types with .dst = .global.
_BITS = frozenset({"b32", "b64", "u32", "s32", "u64"})
_ORDERED = frozenset({"u32", "s32", "u64", "s64", "f16", "bf16"})
ACCEPTED = {
    "add": frozenset({"u32", "s32", "u64", "f32", "f64", "f16", "bf16"}),
    "min": _ORDERED,
    "max": _ORDERED,
    "inc": frozenset({"u32"}),
    "dec": frozenset({"u32"}),
    "and": _BITS,
    "or": _BITS,
    "xor": _BITS,
}
_ITEM = {
    "b32": np.uint32,
    "u32": np.uint32,
    "s32": np.int32,
    "b64": np.uint64,
    "u64": np.uint64,
    "s64": np.int64,
    "f16": np.float16,
    "bf16": ml_dtypes.bfloat16,
    "f32": np.float32,
    "f64": np.float64,
}


def combine(operation: str, kind: str, old: Bytes, new: Bytes, flush: bool = False) -> Bytes:
    """Element-wise reduction of ``new`` (source) into ``old`` (destination).

    Args:
        operation: add, min, max, inc, dec, and, or, xor.
        kind: PTX type of the elements.
        old: contiguous bytes.
        new: contiguous bytes, of the same length.
        flush: whether an addition flushes subnormals of f32.

    Raises:
        IllegalInstruction: the operation does not support this type.
    """
    if kind not in ACCEPTED.get(operation, ()):
        raise IllegalInstruction(
            f"reduction .{operation} of {'.' + kind if kind else 'this element type'}, accepted "
            f"{sorted(ACCEPTED.get(operation, ACCEPTED))} (PTX ISA, cp.reduce.async.bulk)"
        )
    item = np.dtype(_ITEM[kind])
    with np.errstate(all="ignore"):
        result = _OPERATIONS[operation](old.view(item), new.view(item), kind, flush)
    return result.view(np.uint8)


def _add(old: Items, new: Items, kind: str, flush: bool) -> Items:
    if flush:
        old, new = _flushed(old), _flushed(new)
    total: Items = old + new
    if kind == "f64":
        # NaNs pass unchanged, the source's first; inf - inf is the negative quiet NaN (H200).
        total = np.where(np.isnan(old), old, total)
        return np.where(np.isnan(new), new, total)
    if kind in ("f16", "bf16", "f32"):
        bits = total.view(f"u{total.itemsize}")
        # Every NaN becomes canonical (seen on an H200).
        bits[np.isnan(total)] = 0x7FFF_FFFF if kind == "f32" else 0x7FFF
    return _flushed(total) if flush else total


def _flushed(values: Items) -> Items:
    bits = values.view(np.uint32)
    subnormal = bits & np.uint32(0x7F80_0000) == 0
    return np.where(subnormal, bits & np.uint32(0x8000_0000), bits).view(np.float32)


def _extreme(pick: Callable[[Items, Items], Items]) -> Callable[[Items, Items, str, bool], Items]:
    def reduce(old: Items, new: Items, kind: str, flush: bool) -> Items:
        if kind not in ("f16", "bf16"):
            return pick(old, new)
        # Numbers win over NaN, and -0 < +0: compared as integers of the same order.
        keys = [x ^ (x >> 15 & 0x7FFF) for x in (old.view(np.int16), new.view(np.int16))]
        least = keys[0] == pick(keys[0], keys[1])
        chosen = np.where(np.isnan(old), new, np.where(np.isnan(new) | least, old, new))
        bits = chosen.view(np.uint16)
        bits[np.isnan(chosen)] = 0x7FFF
        return chosen

    return reduce


def _inc(old: Items, new: Items, kind: str, flush: bool) -> Items:
    return np.where(old >= new, 0, old + np.uint32(1)).astype(np.uint32)


def _dec(old: Items, new: Items, kind: str, flush: bool) -> Items:
    wraps = (old == 0) | (old > new)
    return np.where(wraps, new, old - np.uint32(1)).astype(np.uint32)


_OPERATIONS: dict[str, Callable[[Items, Items, str, bool], Items]] = {
    "add": _add,
    "min": _extreme(np.minimum),
    "max": _extreme(np.maximum),
    "inc": _inc,
    "dec": _dec,
    "and": lambda old, new, kind, flush: old & new,
    "or": lambda old, new, kind, flush: old | new,
    "xor": lambda old, new, kind, flush: old ^ new,
}
