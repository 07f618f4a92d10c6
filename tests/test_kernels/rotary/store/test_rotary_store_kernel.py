"""``rotary_store`` on GPUs: bit-identical to the reference; no other byte of the cache changes."""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from nvfp4_kernels import InvalidArgument, rotary_store
from nvfp4_kernels.rotary.store.choose import choose_config
from nvfp4_kernels.rotary.store.tile import WARP, RotaryStoreTile
from tests import devices
from tests.emulator import EAGER, STANDARD, Gpu
from tests.test_kernels.bits import check_equal
from tests.test_kernels.rotary.store.rotary_store_cases import (
    BF16,
    CASES,
    EVERY_CASE,
    LLAMA,
    Case,
    check_given,
    check_kernel,
    expected,
    memory,
    on,
    use_many,
)
from tests.test_kernels.rowwise.row_cases import EVERY_SCHEDULE

SM90, SM100 = pytest.mark.arch("sm_90"), pytest.mark.arch("sm_100")
ONE_SCHEDULE = pytest.mark.schedules("random 1")


@SM100
@EVERY_SCHEDULE
@EVERY_CASE
def test_kernel(case: Case, op_device: torch.device) -> None:
    check_kernel(case, op_device)


@SM90
@EVERY_SCHEDULE
@pytest.mark.parametrize(
    "name",
    ["negative slots, padding", "partial", "neighbours", "table in float32", "wide heads, 1 + w"],
)
def test_on_hopper(name: str, op_device: torch.device) -> None:
    check_kernel(CASES[name], op_device)


MANY = {
    "an odd number of heads": Case(17, 3, 1, 64, 32, norms="qk", unstored=2, neox=False),
    "idle threads": Case(9, 5, 5, 96, 96, fp8=True, norms="q"),
    "Llama 3 8B": replace(LLAMA, tokens=5),
}


@SM100
@ONE_SCHEDULE
@pytest.mark.parametrize("case", MANY.values(), ids=MANY)
def test_two_heads_a_thread(
    case: Case, op_device: torch.device, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The layout for many tokens, on few tokens."""
    use_many(monkeypatch)
    check_kernel(case, op_device)


@SM90
@ONE_SCHEDULE
def test_two_heads_a_thread_on_hopper(
    op_device: torch.device, monkeypatch: pytest.MonkeyPatch
) -> None:
    use_many(monkeypatch)
    check_kernel(MANY["an odd number of heads"], op_device)


@SM100
@ONE_SCHEDULE
def test_strides(op_device: torch.device) -> None:
    """Separate q and k with other strides; positions and slots start at any element."""
    given = CASES["negative slots, padding"].arguments()
    q, k, positions, slots = (given[n] for n in ("q", "k", "positions", "slot_mapping"))
    given |= {
        "q": q.transpose(0, 1).contiguous().transpose(0, 1),
        "k": k.contiguous(),
        "positions": torch.cat((positions[:1], positions))[1:],
        "slot_mapping": torch.cat((slots[:1], slots))[1:],
    }
    check_given(given, op_device)


@SM100
@ONE_SCHEDULE
def test_strides_of_single_dimensions_do_not_count(op_device: torch.device) -> None:
    """Strides of dimensions of size 1 are ignored; torch allows any."""
    given = Case(1, 1, 1, 32, 32).arguments()
    for name in ("q", "k", "v"):
        given[name] = given[name].as_strided((1, 1, 32), (3, 7, 1))
    pages = given["kv_cache"][:1].contiguous()
    given["kv_cache"] = pages.as_strided(pages.shape, (5, 9, 64, 1))
    given["slot_mapping"] = torch.tensor([13])
    check_given(given, op_device)


@SM100
@EVERY_SCHEDULE
@pytest.mark.parametrize("many", [False, True], ids=["few", "many"])
def test_result_in_place(
    many: bool, op_device: torch.device, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Idle threads have read their redundant heads before any thread overwrites q in place."""
    if many:
        use_many(monkeypatch)
    check_in_place(op_device)


def check_in_place(device: torch.device) -> None:
    given = Case(17, 5, 1, 208, 16, norms="q", unstored=5, padding=3).arguments()
    given["q"] = given["q"].contiguous()
    queries, _ = expected(given)
    moved = on(given, device)
    q = moved["q"]
    before = q.cpu().clone()
    assert rotary_store(**moved, out=q) is q
    tokens = len(queries)
    check_equal([q[:tokens], q[tokens:]], [queries, before[tokens:]])


@SM100
@ONE_SCHEDULE
@pytest.mark.parametrize("fp8", [False, True], ids=["bfloat16", "E4M3"])
def test_not_finite(fp8: bool, op_device: torch.device) -> None:
    """Infinities and NaN spread over their pair, or over the head if there is a norm."""
    case = Case(4, 2, 2, 64, 32, fp8=fp8)
    for norms in ("", "qk"):
        given = replace(case, norms=norms).arguments()
        for name in "qkv":
            x = given[name]
            x[0, 1, 3], x[1, 0, 40], x[2, 1, 20] = torch.inf, -torch.inf, torch.nan
            x[3, 0] = 0
        queries, cache = expected(given)
        moved = on(given, op_device)
        out = rotary_store(**moved)
        live = given["slot_mapping"]
        rows = [
            x.float().transpose(1, 2)[live // 16, live % 16]
            for x in (moved["kv_cache"].cpu(), cache)
        ]
        for found, right in ((out.cpu(), queries), rows):
            torch.testing.assert_close(found, right, rtol=0, atol=0, equal_nan=True)


@SM100
@ONE_SCHEDULE
def test_every_e4m3_rounding(op_device: torch.device) -> None:
    """All bfloat16 values but NaN, at scales that cause ties and overflow."""
    codes = torch.arange(1 << 16).to(torch.int32).to(torch.int16).view(BF16)
    v = codes[~codes.isnan()]
    v = torch.cat((v, v[:254])).view(-1, 1, 256)
    case = Case(len(v), 1, 1, 256, 256, page_size=64, fp8=True)
    for scale in (0.3, 1.9999999, 2.0**-126, 1.0000001 * 2.0**126):
        given = case.arguments() | {"v": v, "v_scale": torch.tensor(scale)}
        check_given(given, op_device)


@pytest.mark.parametrize(
    "arch", [pytest.param("sm_90", marks=SM90), pytest.param("sm_100", marks=SM100)]
)
@EVERY_SCHEDULE
def test_dependent_launches(arch: str, op_device: torch.device) -> None:
    """A second launch may start before the first has ended, and reads the first one's result."""
    given = CASES["Qwen3"].arguments()
    once, _ = expected(given)
    own = {"q": once, "k": once[:, :8], "v": once[:, 8:16]}
    twice, cache = expected(given | own)
    moved = on(given, op_device)
    first = rotary_store(**moved)
    own = {"q": first, "k": first[:, :8], "v": first[:, 8:16]}
    check_equal([rotary_store(**moved | own)], [twice])
    check_equal([memory(moved["kv_cache"])], [memory(cache)])


def test_same_bits_whatever_the_schedule_and_batch() -> None:
    """A head's result does not depend on other heads or tokens."""
    given = CASES["Qwen3"].arguments()
    results = []
    for schedule in STANDARD[:3]:
        with devices.emulated_ops(schedule):
            results.append(rotary_store(**on(given, torch.device("cpu"))))
            alone = {n: given[n][1:2].clone() for n in ("q", "k", "v", "positions", "slot_mapping")}
            check_equal([rotary_store(**given | alone)], [results[-1][1:2]])
    for other in results[1:]:
        check_equal([other], results[:1])


def check_each_byte_once(case: Case) -> None:
    with devices.emulated_ops(EAGER) as gpu, pytest.MonkeyPatch.context() as patch:
        use_many(patch)
        given = case.arguments()
        rotary_store(**given)
        counted = gpu.launches[-1].counters.nbytes
    element, stored_element = 2, 1 if case.fp8 else 2
    queries, pairs = (
        case.tokens * heads * case.head_dim for heads in (case.q_heads, case.kv_heads)
    )
    positions = given["positions"][: case.tokens]
    read = (queries + 2 * pairs) * element + 2 * 8 * case.tokens
    read += len(positions.unique()) * given["cos_sin_cache"][0].nbytes
    read += sum(given[name].nbytes for name in ("q_norm", "k_norm", "k_scale") if name in given)
    read += 4 * case.fp8
    stored = int((given["slot_mapping"] >= 0).sum()) * case.kv_heads * 2 * case.head_dim
    assert counted["HBM read, each byte once"] == read
    written = queries * element + stored * stored_element
    assert counted["global write"] == counted["HBM write, each byte once"] == written


ONCE = {
    "Llama 3 8B": replace(LLAMA, tokens=19),
    "E4M3": replace(LLAMA, fp8=True, norms="qk"),
    "idle threads": Case(5, 3, 1, 96, 64, norms="qk", unstored=1, padding=1),
}


@pytest.mark.parametrize("case", ONCE.values(), ids=ONCE)
def test_each_byte_once(case: Case) -> None:
    """Heads, and angles of the positions in use, are read once; nothing is written twice."""
    check_each_byte_once(case)


def test_order_of_loads(monkeypatch: pytest.MonkeyPatch) -> None:
    """The order is: release dependents, load weights, wait, load heads, then dependent loads."""
    devices.cutlass_or_skip()
    seen: list[str] = []
    load = Gpu.load
    monkeypatch.setattr(Gpu, "load", lambda gpu, ptx: (seen.append(ptx), load(gpu, ptx))[1])
    case = Case(2, 7, 1, 48, 48, norms="qk")
    with devices.emulated_ops(EAGER):
        use_many(monkeypatch)
        rotary_store(**case.arguments())
    names = "ld.global", "griddepcontrol.", "st.global", "bar.warp"
    lines = (line.strip() for line in seen[-1].splitlines())
    order = [line.split()[0].rstrip(";") for line in lines if line.startswith(names)]
    launch, wait = "griddepcontrol.launch_dependents", "griddepcontrol.wait"
    head, number, meet = "ld.global.v4.b32", "ld.global.b64", "bar.warp.sync"
    store = "st.global.v4.b32"
    queries = [number, *[head] * 4, meet, *[head] * 2, *[store] * 4]
    pairs = [number, number, *[head] * 4, meet, *[head] * 2, *[store] * 4]
    branches = order[order.index(wait) + 1 :]
    assert order[: order.index(wait)] == [launch, head, head]
    assert branches in (queries + pairs, pairs + queries)


def test_choose_config() -> None:
    """Few tokens: warps over all SMs; many: two heads per thread; every head has a thread."""
    sizes = 32, 8, 128, 128
    heads = dict(zip(("query_heads", "kv_heads", "head_dim", "rotary_dim"), sizes, strict=True))
    few = RotaryStoreTile(**heads, threads=WARP, steps=1)
    many = RotaryStoreTile(**heads, threads=128, steps=2)
    assert [choose_config(m, *sizes, 148) for m in (1, 16, 29, 30, 8192)] == [few] * 3 + [many] * 2
    assert (few.units, few.query_units, many.units, many.query_units) == (4, 32, 16, 16)
    for head_dim in range(16, 257, 16):
        for heads, kv_heads in ((1, 1), (7, 1), (64, 8)):
            for m in (1, 1 << 17):
                tile = choose_config(m, heads, kv_heads, head_dim, 16, 148)
                assert tile.lanes >= tile.parts > tile.lanes // 2
                assert tile.threads % WARP == 0
                assert WARP % tile.lanes == 0
                assert heads <= tile.query_units * tile.steps < heads + tile.steps


def zeros(*shape: int) -> Tensor:
    return torch.zeros(shape, dtype=BF16)


REFUSED: dict[str, tuple[Callable[[], dict[str, Any]], str]] = {
    "R": (
        lambda: {"cos_sin_cache": zeros(50, 40)},
        "cos_sin_cache: R is 40, must be a multiple of 16 on sm_100; use vLLM's own",
    ),
    "q starts late": (
        lambda: {"q": zeros(1, 4, 72)[..., 4:68]},
        r"q: starts 8 bytes after a multiple of 16, must start at one; call \.clone",
    ),
    "v spaced oddly": (
        lambda: {"v": zeros(1, 2, 68)[..., :64]},
        r"v: stride 1 is 136 bytes, must be a multiple of 16 on sm_100; call \.contiguous",
    ),
    "pages spaced oddly": (
        lambda: {"kv_cache": zeros(5, 2 * 16 * 128 + 4)[:, 4:].unflatten(1, (2, 16, 128))},
        "kv_cache: starts 8 bytes after a multiple of 16|kv_cache: stride 0 is 8200 bytes",
    ),
    "table starts late": (
        lambda: {"cos_sin_cache": zeros(50 * 64 + 1)[1:].view(50, 64)},
        r"cos_sin_cache: starts 2 bytes after a multiple of 16, must start at one; call \.clone",
    ),
    "norm starts late": (
        lambda: {"q_norm": zeros(65)[1:], "eps": 1e-5},
        r"q_norm: starts 2 bytes after a multiple of 16",
    ),
    "out starts late": (
        lambda: {"out": zeros(4 * 64 + 1)[1:].view(1, 4, 64)},
        r"out: starts 2 bytes after a multiple of 16",
    ),
}


@SM100
@ONE_SCHEDULE
@pytest.mark.parametrize("name", REFUSED)
def test_refused_layout(name: str, op_device: torch.device) -> None:
    make, message = REFUSED[name]
    with op_device:
        changed = make()
    given = on(CASES["one token"].arguments(), op_device)
    with pytest.raises(InvalidArgument, match=message):
        rotary_store(**given | changed)
