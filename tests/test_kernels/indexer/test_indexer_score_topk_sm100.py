"""``indexer_score_topk`` on sm_100, against the oracle.

Values on the oracle's grid make every float32 sum exact, so that ties are ties and top-k is unique.
"""

from typing import Any

import numpy as np
import pytest
import torch

from nvfp4_kernels import InvalidArgument
from nvfp4_kernels.indexer.sm100.tile import ScoreTile
from tests import devices
from tests.emulator import EAGER
from tests.test_kernels.indexer import topk_cases
from tests.test_kernels.indexer.best_keys_cases import (
    HEAD_DIM,
    check,
    chosen,
    run_contiguous,
    run_paged,
    scored,
    use,
)
from tests.test_kernels.indexer.indexer_cases import Case, run_score_topk
from tests.test_kernels.indexer.indexer_oracle import FORMATS, grid, scores
from tests.test_kernels.indexer.indexer_sm100 import on

pytestmark = pytest.mark.arch("sm_100")
ONE_SCHEDULE = pytest.mark.schedules("random 1")
Patch = pytest.MonkeyPatch

# --- every format, with the default configurations ------------------------------------------------

FORMAT_CASE = Case(((199, 200), (64, 65)), heads=16, head_dim=64, block_size=64, top_k=64, next_n=2)


@ONE_SCHEDULE
@pytest.mark.parametrize("fmt", FORMATS)
def test_formats(fmt: str, op_device: torch.device) -> None:
    run_paged(FORMAT_CASE.problem(fmt), op_device)
    run_contiguous(FORMAT_CASE.problem(fmt), op_device)


@ONE_SCHEDULE
def test_64_heads_of_128(op_device: torch.device) -> None:
    """Groups of two queries, the second incomplete; pages of 16 keys."""
    case = Case(
        ((130, 131, 132), (200, 5, 33)), heads=64, head_dim=128, block_size=16, top_k=32, next_n=3
    )
    run_paged(case.problem("nvfp4"), op_device)


@ONE_SCHEDULE
def test_128k_keys(op_device: torch.device) -> None:
    case = Case(((131_072,),), heads=64, head_dim=128, block_size=64, top_k=2048)
    run_paged(case.problem("nvfp4"), op_device)


# --- values, with buffers that overflow -----------------------------------------------------------

# 2600 scores and buffers of 640 candidates, of which 512 may be appended between checks.
LENGTH, TOP_K = 2600, 100
CAPACITY = 640
TILE = ScoreTile("bf16", HEAD_DIM, 2)
PINGPONG = ScoreTile("bf16", HEAD_DIM, 2, pingpong=2)
GROUPS = ScoreTile("bf16", HEAD_DIM, 2, group_queries=2, groups=2)
OVERFLOWS = {"pingpong": chosen(PINGPONG, CAPACITY), "splits": chosen(TILE, CAPACITY, splits=3)}
VALUES = [
    "all equal", "ascending", "descending", "few values", "both zeros", "some NaN",
    "some infinite", "mostly NaN", "mostly -inf", "nothing but NaN and -inf", "nothing but inf",
    "hot",
]  # fmt: skip


SPLIT_VALUES = ["all equal", "ascending", "some NaN", "nothing but NaN and -inf"]


@ONE_SCHEDULE
@pytest.mark.parametrize(
    ("on_what", "name"),
    [("pingpong", name) for name in VALUES] + [("splits", name) for name in SPLIT_VALUES],
)
def test_values(on_what: str, name: str, op_device: torch.device, monkeypatch: Patch) -> None:
    use(monkeypatch, OVERFLOWS[on_what])
    row = topk_cases.rows_of(topk_cases.ROWS[name], 1, LENGTH).numpy()[0]
    run_paged(scored([row], TOP_K), op_device)


def some_rows(*lengths: int) -> list[topk_cases.Row]:
    rng = np.random.default_rng(3)
    return [topk_cases.normal(rng, length).round(1) for length in lengths]


@pytest.mark.parametrize("on_what", ["pingpong", "splits"])
def test_every_schedule(on_what: str, op_device: torch.device, monkeypatch: Patch) -> None:
    use(monkeypatch, OVERFLOWS[on_what])
    run_paged(scored(some_rows(900), TOP_K), op_device)


@ONE_SCHEDULE
@pytest.mark.parametrize(("splits", "next_n"), [(1, 1), (1, 2), (1, 3), (3, 3)])
def test_queries_of_a_group(
    splits: int, next_n: int, op_device: torch.device, monkeypatch: Patch
) -> None:
    """Neighbouring queries choose opposite keys; the last group is incomplete."""
    use(monkeypatch, chosen(GROUPS, CAPACITY, splits=splits))
    run_paged(scored(some_rows(1100, 200), TOP_K, next_n), op_device)


# Zero, one, top_k and top_k + 1 keys, and lengths around the ends of pages, tiles and splits.
LENGTHS = (0, 1, 100, 101, 128, 129, 256, 257, 513)


@ONE_SCHEDULE
@pytest.mark.parametrize("splits", [1, 4])
def test_lengths(splits: int, op_device: torch.device, monkeypatch: Patch) -> None:
    use(monkeypatch, chosen(PINGPONG, CAPACITY, splits=splits))
    run_paged(scored(some_rows(*LENGTHS), TOP_K), op_device)


@ONE_SCHEDULE
@pytest.mark.parametrize("top_k", [1, 127, 128, 129])
def test_top_k(top_k: int, op_device: torch.device, monkeypatch: Patch) -> None:
    use(monkeypatch, chosen(PINGPONG, 768, splits=2))
    run_paged(scored(some_rows(128, 129, 1300), top_k), op_device)


@ONE_SCHEDULE
@pytest.mark.parametrize("splits", [1, 4])
def test_windows(splits: int, op_device: torch.device, monkeypatch: Patch) -> None:
    """Queries of one CTA see overlapping, distant, few or no keys of the same row."""
    fmt, heads, count, keys, top_k = "nvfp4", 4, 9, 1300, 60
    tile = ScoreTile(fmt, HEAD_DIM, heads, 2, 2, doubled=5)
    use(monkeypatch, chosen(tile, CAPACITY, words=128, splits=splits))
    rng = np.random.default_rng(1)
    q, k = grid(fmt, rng, count, heads, HEAD_DIM), grid(fmt, rng, keys, HEAD_DIM)
    weights = rng.integers(-3, 4, size=(count, heads)).astype(np.float64)
    ks = np.array([0, 0, 5, 640, 300, 127, 129, 999, 40], dtype=np.int32)
    ke = np.array([1300, 60, 1200, 1300, 300, 188, 190, 1000, 101], dtype=np.int32)
    arguments = {
        "q": q.data, "q_scales": q.scales, "k": k.data, "k_scales": k.scales,
        "weights": torch.from_numpy(weights).float(), "ks": torch.tensor(ks),
        "ke": torch.tensor(ke), "fmt": fmt, "top_k": top_k,
    }  # fmt: skip
    seen = [slice(*ends) for ends in zip(ks, ke, strict=True)]
    rows = [scores(q.values[n], k.values[seen[n]], weights[n]) for n in range(count)]
    check(run_score_topk(**on(op_device, arguments)), rows, top_k)


@ONE_SCHEDULE
@pytest.mark.parametrize(("splits", "length"), [(1, 12_000), (2, 6000)])
def test_a_longer_row(
    splits: int, length: int, op_device: torch.device, monkeypatch: Patch
) -> None:
    """Rows of more than 4096 keys are sorted piecewise; buffers are checked every other phase."""
    use(monkeypatch, chosen(TILE, 2048, sync_phases=2, words=128, splits=splits))
    run_paged(scored(some_rows(length), 1000), op_device)


@ONE_SCHEDULE
def test_most_keys(op_device: torch.device) -> None:
    """The largest top-k that is supported, in the default configuration."""
    run_paged(scored(some_rows(4300), 4096), op_device)


# --- memory that is not read or written -------------------------------------------------------


@pytest.mark.parametrize("splits", [1, 2])
def test_short_rows_are_not_scored(splits: int, monkeypatch: Patch) -> None:
    """Rows of at most ``top_k`` keys are not scored, and their pages are not looked up."""
    with devices.emulated_ops(EAGER) as gpu:
        tile = ScoreTile("nvfp4", HEAD_DIM, 8, 1, 2, doubled=5)
        use(monkeypatch, chosen(tile, CAPACITY, splits=splits))
        case = Case(((80, 100), (50, 101)), heads=8, next_n=2, block_size=64, top_k=100)
        problem = case.problem("nvfp4")
        arguments = problem.paged()
        arguments["block_table"][0] = 1 << 30
        found = run_score_topk(**arguments, top_k=100)
        check(found, problem.expected(), 100)
        assert gpu.launches[-splits].counters.multiplies.total() == 1  # one key tile
        arguments["context_lens"].clamp_(max=100)
        arguments["block_table"][:] = 1 << 30
        indices, valid = run_score_topk(**arguments, top_k=100)
        assert valid.tolist() == [80, 100, 50, 100]
        assert indices[3].tolist() == list(range(100))
        assert gpu.launches[-splits].counters.multiplies.total() == 0


def test_no_logits_in_global_memory(monkeypatch: Patch) -> None:
    with devices.emulated_ops(EAGER) as gpu:
        use(monkeypatch, chosen(PINGPONG, CAPACITY))
        run_paged(scored(some_rows(2000, 1000), TOP_K), torch.device("cpu"))
        assert gpu.launches[-1].counters.nbytes["global write"] == 2 * 4 * (TOP_K + 1)
        use(monkeypatch, chosen(PINGPONG, CAPACITY, splits=4))
        run_paged(scored(some_rows(2000, 1000), TOP_K), torch.device("cpu"))
        written = gpu.launches[-2].counters.nbytes["global write"]
        assert written == 2 * 4 * (4 * 2 * TOP_K + 1)


@ONE_SCHEDULE
def test_the_same_every_time(op_device: torch.device, monkeypatch: Patch) -> None:
    """Repeated calls give the same keys: no state is left behind."""
    use(monkeypatch, OVERFLOWS["splits"])
    arguments = on(op_device, scored(some_rows(1000, 700), TOP_K).paged())
    first = run_score_topk(**arguments, top_k=TOP_K)
    again = run_score_topk(**arguments, top_k=TOP_K)
    assert torch.equal(first[0], again[0])


@ONE_SCHEDULE
def test_nothing_to_choose_from(op_device: torch.device) -> None:
    def none(*lens: int) -> dict[str, Any]:
        problem = Case(tuple((0,) for _ in lens)).problem("nvfp4")
        return on(op_device, problem.paged())

    indices, valid = run_score_topk(**none(), top_k=3)
    assert (indices.shape, valid.shape) == ((0, 3), (0,))
    for pages in (None, 0):
        arguments = none(0, 0)
        arguments["cache"] = arguments["cache"][:pages]
        indices, valid = run_score_topk(**arguments, top_k=3)
        assert indices.tolist() == [[-1] * 3] * 2
        assert valid.tolist() == [0, 0]
    contiguous = Case(((0,), (0,))).problem("nvfp4").contiguous()
    indices, valid = run_score_topk(**on(op_device, contiguous), top_k=3)
    assert indices.tolist() == [[-1] * 3] * 2


@ONE_SCHEDULE
def test_errors(op_device: torch.device) -> None:
    def refuses(match: str, fmt: str = "nvfp4", top_k: int = 8, **changed: Any) -> None:
        arguments = on(op_device, Case(((20,),), **changed).problem(fmt).paged())
        with pytest.raises(InvalidArgument, match=match):
            run_score_topk(**arguments, top_k=top_k)

    refuses("q: D is 96, must be one of 64, 128, 256 on sm_100", head_dim=96)
    refuses("q: has 129 heads, must have from 1 to 128 on sm_100", heads=129)
    refuses("block_size: is 8, must be a power of two of at least 16 on sm_100", block_size=8)
    refuses("top_k: is 4097, must be from 1 to 4096", top_k=4097)
    refuses(
        "top_k: is 4096, for which 128 bf16 heads of 256 leave too little shared memory on sm_100",
        "bf16", top_k=4096, heads=128, head_dim=256,
    )  # fmt: skip
    arguments = on(op_device, Case(((20,),)).problem("nvfp4").paged())
    arguments["max_context_len"] = (1 << 30) + 1
    with pytest.raises(InvalidArgument, match="max_context_len: 1073741825 keys, must be at most"):
        run_score_topk(**arguments, top_k=8)
