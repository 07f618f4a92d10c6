"""Instruction families: each file emits the code of one family and holds its runtime functions."""

from tests.emulator.instructions import (
    atomic,
    bulk,
    call,
    cluster,
    control,
    copy,
    lanewise,
    load_store,
    matrix,
    mbarrier,
    multiply,
    remote,
    synchronise,
    tensor,
    warp_wide,
    warpgroup,
)
from tests.emulator.instructions.registry import FAMILIES, RUNTIME

__all__ = [
    "FAMILIES",
    "RUNTIME",
    "atomic",
    "bulk",
    "call",
    "cluster",
    "control",
    "copy",
    "lanewise",
    "load_store",
    "matrix",
    "mbarrier",
    "multiply",
    "remote",
    "synchronise",
    "tensor",
    "warp_wide",
    "warpgroup",
]
