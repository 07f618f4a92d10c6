"""Communication between the lanes of a warp: shuffles, votes, matches, reductions, election."""

from collections.abc import Iterator

from tests.test_emulator.silicon.case import Case
from tests.test_emulator.silicon.cases.banks import LANES
from tests.test_emulator.silicon.cases.instructions import Op, groups

_ALL = "=0xffffffff"
# Runs one instruction in lanes 0-15 and another in lanes 16-31, as the two sides of a branch do.
_HALVES = (
    "{{ .reg .pred %low; .reg .b32 %lane; mov.u32 %lane, %laneid; setp.lt.u32 %low, %lane, 16;"
    " @%low {0} @!%low {1} }}"
)


def _shuffles() -> Iterator[Op]:
    for mode in ("idx", "up", "down", "bfly"):
        # Lane and clamp operands that differ from lane to lane, with random segment masks.
        yield Op(f"shfl.sync.{mode}.b32", "32|p", f"u32:0 field:1 segment:2 {_ALL}")
        yield Op(f"shfl.sync.{mode}.b32", "32|p", f"u32:0 lane:1 =0x1f {_ALL}")
        yield Op(f"shfl.sync.{mode}.b32", "32|p", f"u32:0 lane:1 =0 {_ALL}")
        yield Op(f"shfl.sync.{mode}.b32", "32|p", f"u32:0 =1 =0x1f {_ALL}")
        yield Op(f"shfl.sync.{mode}.b32", "32|p", f"u32:0 =4 =0x180f {_ALL}")
    yield Op(
        "shfl.sync.bfly.b32 in halves",
        "32|p",
        "u32:0 field:1 lane:2",
        _HALVES.format(
            "shfl.sync.bfly.b32 $d0|$d1, $a0, 5, 0x1f, 0x0000ffff;",
            "shfl.sync.down.b32 $d0|$d1, $a0, 0, 0x1f, 0xffff0000;",
        ),
    )


def _votes() -> Iterator[Op]:
    for mode in ("all", "any", "uni"):
        yield Op(f"vote.sync.{mode}.pred", "p", f"p {_ALL}")
    yield Op("vote.sync.ballot.b32", "32", f"p {_ALL}")
    yield Op(
        "vote.sync.ballot.b32 in halves",
        "32",
        "p",
        _HALVES.format(
            "vote.sync.ballot.b32 $d0, $a0, 0x0000ffff;",
            "vote.sync.ballot.b32 $d0, $a0, 0xffff0000;",
        ),
    )
    yield Op("match.any.sync.b32", "32", f"few {_ALL}")
    yield Op("match.all.sync.b32", "32|p", f"few {_ALL}")
    yield Op("match.any.sync.b64", "32", f"few64 {_ALL}")
    yield Op("match.all.sync.b64", "32|p", f"few64 {_ALL}")
    yield Op("match.all.sync.b32 of one value", "32|p", "few", "match.all.sync.b32 $d0|$d1, 7, -1;")
    for name in ("add", "min", "max"):
        for kind in ("u32", "s32"):
            yield Op(f"redux.sync.{name}.{kind}", "32", f"u32 {_ALL}")
    for name in ("and", "or", "xor"):
        yield Op(f"redux.sync.{name}.b32", "32", f"u32 {_ALL}")
    yield Op(
        "redux.sync.add.u32 in halves",
        "32",
        "u32",
        _HALVES.format(
            "redux.sync.add.u32 $d0, $a0, 0x0000ffff;",
            "redux.sync.max.s32 $d0, $a0, 0xffff0000;",
        ),
    )
    yield Op("elect.sync", "32|p", f"{_ALL}")
    yield Op(
        "elect.sync in halves",
        "32|p",
        "u32",
        _HALVES.format("elect.sync $d0|$d1, 0x0000ffff;", "elect.sync $d0|$d1, 0xffff0000;"),
    )
    yield Op("activemask.b32", "32", "u32", "activemask.b32 $d0;")
    for name in ("eq", "le", "lt", "ge", "gt"):
        yield Op(f"%lanemask_{name}", "32", "u32", f"mov.u32 $d0, %lanemask_{name};")


def cases() -> Iterator[Case]:
    yield from groups("shuffles", _shuffles(), LANES)
    yield from groups("votes", _votes(), LANES)
