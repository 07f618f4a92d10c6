"""Values that one instruction makes the same for all lanes of a warp."""

import numpy as np
import pytest

from tests.test_emulator.assemble import Run, global_array

_STORE = "mad.wide.u32 %rd1, %r90, 4, %rd90; st.global.b32 [%rd1], %r1;"


def result(body: str, **options: int) -> list[int]:
    threads = options.get("block", 32) * options.get("grid", 1)
    out = global_array(np.zeros(threads), np.uint32)
    Run(**options)(body + _STORE, out, shared=64)
    return out.tolist()


@pytest.mark.parametrize(
    ("shuffle", "expected"),
    [
        ("shfl.sync.idx.b32 %r2|%p1, %r3, 5, 31, -1;", [2 * 5 + 100] * 32),
        ("shfl.sync.idx.b32 _|%p1, %r3, 5, 31, -1; mov.u32 %r2, 3;", [103] * 32),
        ("shfl.sync.idx.b32 %r2|%p1, 9, 5, 31, -1;", [109] * 32),
        # %r2 differs between lanes elsewhere; %p1 does not.
        ("mov.u32 %r2, %r90; shfl.sync.idx.b32 %r2|%p1, %r2, 7, 31, -1;", [107] * 32),
        ("shfl.sync.idx.b32 %r2|%p1, %r3, %laneid, 31, -1;", [2 * t + 100 for t in range(32)]),
        # The clamp keeps lanes of the upper half from reaching lane 20 of the lower one.
        (
            "shfl.sync.up.b32 %r2|%p1, %r3, 4, 0, -1;",
            [2 * t for t in range(4)] + [2 * (t - 4) + 100 for t in range(4, 32)],
        ),
    ],
)
def test_shuffle_with_its_predicate(shuffle: str, expected: list[int]) -> None:
    body = f"""
        add.u32 %r3, %r90, %r90;
        {shuffle}
        selp.b32 %r4, 100, 0, %p1;
        add.u32 %r1, %r2, %r4;
    """
    assert result(body) == expected


@pytest.mark.parametrize(
    ("space", "own", "peer"),
    [("shared", 1, 0), ("shared::cta", 1, 0), ("shared::cluster", 1, 1), ("global", 0, 0)],
)
def test_whose_shared_memory_an_address_is_in(space: str, own: int, peer: int) -> None:
    """Shared memory of the CTA that an address names, whether uniform across lanes or not."""
    body = f"""
        mov.u32 %r2, smem; cvt.u64.u32 %rd2, %r2; cvta.shared.u64 %rd2, %rd2;
        mov.u32 %r3, %cluster_ctarank; xor.b32 %r4, %r3, 1; mapa.u64 %rd3, %rd2, %r4;
        isspacep.{space} %p1, %rd2; isspacep.{space} %p2, %rd3;
        cvt.u64.u32 %rd4, %r90; add.u64 %rd5, %rd3, %rd4; isspacep.{space} %p3, %rd5;
        selp.b32 %r5, 1, 0, %p1; selp.b32 %r6, 2, 0, %p2; selp.b32 %r7, 4, 0, %p3;
        add.u32 %r1, %r5, %r6; add.u32 %r1, %r1, %r7;
        mov.u32 %r8, %ctaid.x; mad.lo.u32 %r90, %r8, 32, %r90;
    """
    assert result(body, grid=2, cluster=2) == [own + 2 * peer + 4 * peer] * 64
