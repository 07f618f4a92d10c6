"""Argument checks of cp.async.bulk and cp.reduce.async.bulk, which copy plain byte ranges."""

from functools import lru_cache

import numpy as np
import numpy.typing as npt

from tests.emulator.findings import IllegalInstruction, Misaligned
from tests.emulator.tma.reduction import ACCEPTED

# PTX ISA 9.7.9.25.4.2, table of operations and types with .dst = .shared::cluster.
_ACCEPTED_SHARED = {
    "add": frozenset({"u32", "s32", "u64"}),
    "min": frozenset({"u32", "s32"}),
    "max": frozenset({"u32", "s32"}),
    "inc": frozenset({"u32"}),
    "dec": frozenset({"u32"}),
    "and": frozenset({"b32"}),
    "or": frozenset({"b32"}),
    "xor": frozenset({"b32"}),
}


def check_copy(nbytes: int, *addresses: int) -> None:
    """Check the size of a bulk copy or prefetch and its addresses (PTX ISA 9.7.9.25.4.1).

    Raises:
        IllegalInstruction: the size is not a multiple of 16.
        Misaligned: an address that is not a multiple of 16.
    """
    if nbytes % 16:
        raise IllegalInstruction(f"bulk copy of {nbytes} bytes, accepted multiples of 16")
    for address in addresses:
        if address % 16:
            raise Misaligned(f"bulk copy at {address:#x}, accepted multiples of 16")


def check_reduction(operation: str, kind: str, destination: str, noftz: bool = False) -> None:
    """Check a bulk reduction's operation and type.

    Args:
        operation: add, min, max, inc, dec, and, or, xor.
        kind: PTX type, without its dot.
        destination: "global" or "shared::cluster".
        noftz: whether the instruction has .noftz.

    Raises:
        IllegalInstruction: the PTX ISA does not list the combination.
    """
    table = ACCEPTED if destination == "global" else _ACCEPTED_SHARED
    kinds = table.get(operation, frozenset())
    if operation in ("and", "or", "xor"):
        kinds = kinds & {"b32", "b64"}
    if kind not in kinds:
        raise IllegalInstruction(
            f"cp.reduce.async.bulk.{destination} .{operation} of .{kind}, accepted {sorted(kinds)}"
        )
    if noftz != (operation == "add" and kind in ("f16", "bf16")):
        raise IllegalInstruction(
            f"cp.reduce.async.bulk .{operation}.{kind} {'with' if noftz else 'without'} .noftz, "
            "which belongs to .add.f16 and .add.bf16 alone"
        )


@lru_cache(maxsize=256)
def byte_mask(mask: int, nbytes: int) -> npt.NDArray[np.bool_]:
    """Mask of the ``nbytes`` bytes that .cp_mask writes: bit i stands for byte i of every 16."""
    chosen = np.tile((mask >> np.arange(16) & 1).astype(bool), nbytes // 16)
    chosen.setflags(write=False)
    return chosen
