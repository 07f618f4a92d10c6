"""Accesses that run from one array of shared memory into the bytes before the next array."""

from dataclasses import dataclass

import numpy as np
import pytest

from tests.emulator import B200, EAGER, STANDARD, Gpu, Schedule
from tests.emulator.findings import ArrayOverrun, LaunchError
from tests.emulator.ptx.shared_arrays import (
    MAX_GUARD,
    between,
    comments,
    end_of,
    guard_bytes,
    guard_of,
    laid_out,
    told,
)
from tests.emulator.ptx.syntax import SharedArray
from tests.emulator.tma.element_type import ElementType
from tests.emulator.tma.tensor_map import TensorMap, encode
from tests.test_emulator import wgmma_kernel
from tests.test_emulator.assemble import Run, assemble, global_array
from tests.test_emulator.test_machine_tensor import ALLOC, GEMM, MMA, gemm

# ``smem``, of 1024 bytes, and ``next`` behind it are written; ``bar`` expects 256 bytes.
_BEFORE = """
    .shared .align 16 .b8 next[1024];
    .shared .align 8 .b8 bar[8];
    mov.u32 %r1, smem;
    mov.u32 %r2, next;
    mov.u32 %r3, bar;
    mad.lo.u32 %r4, %r90, 32, %r1;
    mad.lo.u32 %r5, %r90, 32, %r2;
    st.shared.v4.b32 [%r4], {%r90, %r90, %r90, %r90};
    st.shared.v4.b32 [%r4+16], {%r90, %r90, %r90, %r90};
    st.shared.v4.b32 [%r5], {%r90, %r90, %r90, %r90};
    st.shared.v4.b32 [%r5+16], {%r90, %r90, %r90, %r90};
    setp.eq.u32 %p1, %r90, 0;
    @%p1 mbarrier.init.shared.b64 [%r3], 1;
    @%p1 fence.mbarrier_init.release.cluster;
    fence.proxy.async.shared::cta;
    bar.sync 0;
    add.u32 %r6, %r1, AT;
    mapa.shared::cluster.u32 %r7, %r6, 0;
    and.b32 %r8, %r90, 7;
    mad.lo.u32 %r9, %r8, 16, %r6;
"""
_EXPECT = "@%p1 mbarrier.arrive.expect_tx.shared.b64 _, [%r3], 256;\n"
_WAIT = """
WAIT:
    mbarrier.try_wait.parity.shared.b64 %p2, [%r3], 0;
    @!%p2 bra WAIT;
"""
_STORED = "\n@%p1 cp.async.bulk.commit_group; @%p1 cp.async.bulk.wait_group 0;"
_TILE = "shared::cluster.global.tile.mbarrier::complete_tx::bytes"
_FETCH = "@%p1 cp.async.bulk.shared::cluster"
_SEND = """
    mad.lo.u32 %r10, %r90, 8, %r7;
    mapa.shared::cluster.u32 %r11, %r3, 0;
    st.async.shared::cluster.mbarrier::complete_tx::bytes.v2.b32 [%r10], {%r90, %r90}, [%r11];
"""
_WITHIN = f"""
    mapa.shared::cluster.u32 %r10, %r2, 0;
    mapa.shared::cluster.u32 %r11, %r3, 0;
    {_FETCH}.shared::cta.mbarrier::complete_tx::bytes [%r10], [%r6], 256, [%r11];
"""


@dataclass(frozen=True)
class Reach:
    """Access of ``nbytes`` bytes at %r6; ``step`` is its alignment if not ``nbytes``."""

    nbytes: int
    body: str
    step: int = 0

    @property
    def last(self) -> int:
        """Largest offset at which the access stays within ``smem``."""
        return 1024 - self.nbytes

    @property
    def beyond(self) -> int:
        """Smallest valid offset at which the access leaves ``smem``."""
        return self.last + (self.step or self.nbytes)


REACHES = {
    "load": Reach(4, "ld.shared.b32 %r10, [%r6];"),
    "load of a byte": Reach(1, "ld.shared.u8 %r10, [%r6];"),
    "generic load": Reach(
        4, "cvt.u64.u32 %rd1, %r6; cvta.shared.u64 %rd2, %rd1; ld.b32 %r10, [%rd2];"
    ),
    "store of vectors": Reach(16, "st.shared.v4.b32 [%r6], {%r90, %r90, %r90, %r90};"),
    "store of one lane": Reach(4, "@%p1 st.shared.b32 [%r6], %r90;"),
    "atomic": Reach(4, "atom.shared.add.u32 %r10, [%r6], 1;"),
    "reduction": Reach(4, "red.shared.add.u32 [%r6], 1;"),
    "load from a cluster": Reach(4, "ld.shared::cluster.b32 %r10, [%r7];"),
    "store to a cluster": Reach(4, "@%p1 st.shared::cluster.b32 [%r7], %r90;"),
    "ldmatrix": Reach(128, "ldmatrix.sync.aligned.m8n8.x1.shared.b16 {%r10}, [%r9];", 16),
    "stmatrix": Reach(128, "stmatrix.sync.aligned.m8n8.x1.shared.b16 [%r9], {%r90};", 16),
    "cp.async": Reach(16, "@%p1 cp.async.cg.shared.global [%r6], [%rd90], 16; cp.async.wait_all;"),
    "mbarrier.init": Reach(8, "@%p1 mbarrier.init.shared.b64 [%r6], 1;"),
    "st.async": Reach(256, f"{_EXPECT} {_SEND} {_WAIT}", 8),
    "bulk load": Reach(
        256,
        f"{_EXPECT} {_FETCH}.global.mbarrier::complete_tx::bytes [%r6], [%rd90], 256, [%r3]; "
        + _WAIT,
        16,
    ),
    "bulk store": Reach(
        256, f"@%p1 cp.async.bulk.global.shared::cta.bulk_group [%rd91], [%r6], 256; {_STORED}", 16
    ),
    "bulk reduction": Reach(
        256,
        "@%p1 cp.reduce.async.bulk.global.shared::cta.bulk_group.add.u32 [%rd91], [%r6], 256; "
        + _STORED,
        16,
    ),
    "bulk copy within the CTA": Reach(256, f"{_EXPECT} {_WITHIN} {_WAIT}", 16),
    "box": Reach(
        256,
        f"{_EXPECT} @%p1 cp.async.bulk.tensor.2d.{_TILE} [%r6], [%rd92, {{0, 0}}], [%r3]; {_WAIT}",
        128,
    ),
    "stored box": Reach(
        256,
        "@%p1 cp.async.bulk.tensor.2d.global.shared::cta.tile.bulk_group [%rd93, {0, 0}], [%r6]; "
        + _STORED,
        128,
    ),
}


def _launch(reach: Reach, at: int, schedule: Schedule = EAGER) -> None:
    source = global_array(np.arange(64), np.uint32)
    target = global_array(np.zeros(64), np.uint32)
    maps = [
        TensorMap(ElementType.U8, array.ctypes.data, (32, 8), (32,), (32, 8), (1, 1))
        for array in (source, target)
    ]
    encoded = [global_array(np.frombuffer(encode(each), np.uint8)) for each in maps]
    body = _BEFORE.replace("AT", str(at)) + reach.body
    Run(schedule=schedule)(body, source, target, *encoded, shared=1024)


@pytest.mark.parametrize("name", REACHES)
def test_an_access_ends_where_its_array_does(name: str) -> None:
    reach = REACHES[name]
    for schedule in STANDARD:
        _launch(reach, reach.last, schedule)
        with pytest.raises(
            ArrayOverrun, match=r"at 0x800: 0 bytes after the end of array 0 \(smem\) of 1024 bytes"
        ):
            _launch(reach, reach.beyond, schedule)


_OPERAND_B = "add.u64 %rd6, %rd5, 256;"


@pytest.mark.parametrize(
    ("old", "new"),
    [
        (_OPERAND_B, f"add.u64 %rd6, %rd5, {(9216 - 2048) // 16 + 1};"),
        (MMA, f"add.u64 %rd5, %rd5, {(9216 - 4096) // 16 + 1};\n    {MMA}"),
        (ALLOC, ALLOC.replace("[%r3]", "[%r3+1016]")),
    ],
    ids=["operand B of an MMA", "operand A of an MMA", "tcgen05.alloc"],
)
def test_the_tensor_core_too(old: str, new: str) -> None:
    assert GEMM.count(old) == 1
    with pytest.raises(ArrayOverrun, match=r"after the end of array 0 \(smem\) of 9216 bytes"):
        gemm(GEMM.replace(old, new))


def test_an_operand_of_wgmma_too() -> None:
    old = "shr.u32 %r7, %r1, 4;"
    assert wgmma_kernel.KERNEL.count(old) == 1
    wrong = wgmma_kernel.KERNEL.replace(old, f"add.u32 %r7, %r1, 1024; {old[:-12]}%r7, %r7, 4;")
    with pytest.raises(ArrayOverrun, match=r"after the end of array 0 \(smem\) of 2048 bytes"):
        wgmma_kernel.launch(wrong)


_ARRAYS = laid_out([SharedArray(0, 24, 32, 8, "a.py:7"), SharedArray(0, 100, 112, 128)])


def _dynamic(body: str, nbytes: int) -> None:
    module = assemble(body, 0).replace(
        ".visible", ".extern .shared .align 128 .b8 dynamic[];\n.visible", 1
    )
    gpu = Gpu()
    loaded = gpu.load(module + comments("k", _ARRAYS))
    launch = gpu.launch(loaded, "k", (1, 1, 1), (32, 1, 1), dynamic_shared=nbytes)
    assert launch.shared_bytes == 228
    assert launch.memory_bytes == nbytes


def test_arrays_that_a_comment_tells() -> None:
    assert [array.offset for array in _ARRAYS] == [0, 128]
    assert end_of(_ARRAYS) == 340
    assert guard_bytes(_ARRAYS) == 340 - 228
    assert told(comments("k", _ARRAYS) + comments("other", _ARRAYS[:1])) == {
        "k": _ARRAYS,
        "other": _ARRAYS[:1],
    }
    store = "mov.u32 %r1, dynamic; st.shared.b32 [%r1+{}], %r90;"
    for inside in (0, 20, 128, 224):
        _dynamic(store.format(inside), 340)
    for outside, beyond, array in ((24, 0, r"0 \(a.py:7\)"), (124, 100, "0"), (228, 0, "1")):
        match = f"write of shared memory .* {beyond} bytes after the end of array {array} "
        with pytest.raises(ArrayOverrun, match=match):
            _dynamic(store.format(outside), 340)
    with pytest.raises(LaunchError, match="328 bytes, the arrays of k end at 340"):
        _dynamic("", 328)


LOAD = "ld.shared.v4.b32 {%r11, %r12, %r13, %r14}, [%r1+AT];"


@pytest.mark.parametrize(
    ("mask", "at", "beyond"),
    [(None, 16, 0), (0xFFF, 16, 0), (0xFF, 16, None), (0xF00F, 0, None), (0xF000, 16, 4)],
)
def test_bytes_that_a_load_uses(mask: int | None, at: int, beyond: int | None) -> None:
    """Loads at the end of a 24-byte array; a pragma names the bytes that a wide load uses."""
    pragma = "" if mask is None else f'.pragma "used_bytes_mask {mask:#x}";'
    written = (0, 12, 16, 20)  # the words between are unwritten: to read them is a finding
    stores = " ".join(f"st.shared.b32 [%r1+{offset}], %r90;" for offset in written)
    load = LOAD.replace("AT", str(at))
    body = f"mov.u32 %r1, dynamic; {stores} bar.warp.sync 0xffffffff; {pragma} {load}"
    if beyond is None:
        _dynamic(body, 340)
        return
    with pytest.raises(ArrayOverrun, match=f" {beyond} bytes after the end of array 0"):
        _dynamic(body, 340)


def test_guards_are_as_long_as_their_arrays() -> None:
    assert [guard_of(n) for n in (1, 16, 17, 4000)] == [16, 16, 32, MAX_GUARD]
    assert between(_ARRAYS, 24).startswith("0 bytes after the end of array 0 (a.py:7) of 24")


def test_static_arrays_take_no_more_of_the_device() -> None:
    launch = Run()("mov.u32 %r1, smem;", shared=B200.shared)
    assert launch.shared_bytes == B200.shared
    assert launch.memory_bytes == B200.shared + MAX_GUARD
