"""Arrays of a kernel in dynamic shared memory, listed in comments at the end of its PTX.

To PTX, dynamic shared memory is one symbol without a size. The compiler of a kernel may append the
layout, with guard bytes between the arrays: accesses to guard bytes are findings.
"""

import bisect
import re
from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from tests.emulator.ptx.syntax import SharedArray

# Upper limit of the guard bytes behind an array. A row or column of a tile is shorter.
MAX_GUARD = 1024

_COMMENT = re.compile(
    r"^//@ shared array of (?P<kernel>[\w.$%]+): (?P<numbers>\d+ \d+ \d+ \d+)(?P<source> .*)?$",
    re.MULTILINE,
)


def comments(kernel: str, arrays: Sequence[SharedArray]) -> str:
    """Lines to append to the PTX of ``kernel``."""
    return "".join(
        f"//@ shared array of {kernel}: {a.offset} {a.nbytes} {a.guard} {a.align} {a.source}\n"
        for a in arrays
    )


def told(text: str) -> dict[str, list[SharedArray]]:
    """Arrays of each kernel, parsed from comments of a PTX text."""
    found: dict[str, list[SharedArray]] = {}
    for match in _COMMENT.finditer(text):
        offset, nbytes, guard, align = map(int, match["numbers"].split())
        array = SharedArray(offset, nbytes, guard, align, (match["source"] or "").strip())
        found.setdefault(match["kernel"], []).append(array)
    return found


def guard_of(nbytes: int) -> int:
    """Number of guard bytes behind an array of ``nbytes``, enough to catch doubled indices.

    The size of the array rounded up to 16 bytes, at most ``MAX_GUARD``.
    """
    return min(-(-nbytes // 16) * 16, MAX_GUARD)


def laid_out(arrays: Sequence[SharedArray]) -> list[SharedArray]:
    """Arrays at the offsets of CuTe DSL: in order, each at its alignment."""
    placed, end = [], 0
    for array in arrays:
        offset = -(-end // array.align) * array.align
        placed.append(SharedArray(offset, array.nbytes, array.guard, array.align, array.source))
        end = offset + array.nbytes + array.guard
    return placed


def end_of(arrays: Sequence[SharedArray]) -> int:
    """Bytes from the start of dynamic shared memory to the last guard's end."""
    return arrays[-1].offset + arrays[-1].nbytes + arrays[-1].guard if arrays else 0


def guard_bytes(arrays: Sequence[SharedArray]) -> int:
    """Bytes that the guards add to dynamic shared memory."""
    bare = [SharedArray(0, array.nbytes, 0, array.align) for array in arrays]
    return end_of(arrays) - end_of(laid_out(bare))


def granules_between(arrays: Sequence[SharedArray], granule: int) -> npt.NDArray[np.intp]:
    """Numbers of the granules (of ``granule`` bytes) that contain no byte of any array."""
    starts = [*(array.offset for array in arrays[1:]), end_of(arrays)]
    return np.concatenate(
        [
            np.arange(-(-(array.offset + array.nbytes) // granule), start // granule)
            for array, start in zip(arrays, starts, strict=True)
        ]
    )


def between(arrays: Sequence[SharedArray], offset: int) -> str:
    """Text for a report: distance of ``offset``, in a gap, from the end of the array before it."""
    number = bisect.bisect(arrays, offset, key=lambda array: array.offset) - 1
    array = arrays[number]
    beyond = offset - array.offset - array.nbytes
    name = f"{number} ({array.source})" if array.source else str(number)
    return f"{beyond} bytes after the end of array {name} of {array.nbytes} bytes"
