"""Instruction order that the compiler must keep."""

from typing import TypeVar

from cutlass import Int32, Int64
from cutlass.experimental import primitives as ptx

_Integer = TypeVar("_Integer", Int32, Int64)


def pinned(value: _Integer) -> _Integer:
    """Opaque copy of ``value``; forces the computation of ``value`` before the code that follows.

    The compiler otherwise sinks arithmetic to the use of the result, e.g. below a wait, where the
    latency is exposed instead of hidden.
    """
    return ptx.inline_ptx(
        f"mov.b{type(value).width} {{$w0}}, {{$r0}};",
        write_only_types=[type(value)],
        read_only_args=[value],
    )
