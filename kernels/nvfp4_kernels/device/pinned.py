"""Order that the compiler keeps: values pinned before what follows."""

from typing import TypeVar

from cutlass import Int32, Int64
from cutlass.experimental import primitives as ptx

_Integer = TypeVar("_Integer", Int32, Int64)


def pinned(value: _Integer) -> _Integer:
    """``value``, computed before what follows.

    The compiler moves arithmetic to where its result is used: behind a wait, where it is waited
    for, though there was time before.
    """
    return ptx.inline_ptx(
        f"mov.b{type(value).width} {{$w0}}, {{$r0}};",
        write_only_types=[type(value)],
        read_only_args=[value],
    )
