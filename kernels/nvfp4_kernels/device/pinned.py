"""Order of instructions that the compiler must keep."""

from typing import TypeVar

from cutlass import Int32, Int64
from cutlass.experimental import primitives as ptx

_Integer = TypeVar("_Integer", Int32, Int64)


def pinned(value: _Integer) -> _Integer:
    """``value``, computed before the code that follows.

    The compiler sinks arithmetic to the use of its result: behind a wait, where its latency is
    exposed instead of hidden.
    """
    return ptx.inline_ptx(
        f"mov.b{type(value).width} {{$w0}}, {{$r0}};",
        write_only_types=[type(value)],
        read_only_args=[value],
    )
