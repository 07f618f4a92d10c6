"""Instruction families: each file emits the code of one family and holds its runtime functions.

Emitters take the :class:`Emitter` ``e`` and the instruction ``i``. Runtime functions take the warp
``w``, operands that are Python scalars or arrays of 32 lanes, the ``mask`` of active lanes (None:
all live lanes) and the PTX ``line``. Further common parameters: ``space`` is a state space,
``scope`` a :class:`Scope`, ``wide`` stands for cluster scope, ``strong`` is as in :class:`Origin`,
``ranks`` is a multicast mask of CTA ranks or None, and ``group`` the number of .cta_group.
"""

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
