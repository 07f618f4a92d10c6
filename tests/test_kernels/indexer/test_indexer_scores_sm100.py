"""``indexer_logits`` on sm_100, against the oracle.

Values on the oracle's grid make every float32 sum exact, so that scores are equal bit for bit.
"""

from typing import Any

import numpy as np
import pytest
import torch

from nvfp4_kernels import InvalidArgument
from nvfp4_kernels.devices import standing_in
from nvfp4_kernels.indexer.sm100.tile import Format, ScoreTile
from tests.test_kernels.indexer.indexer_cases import Case, run_logits
from tests.test_kernels.indexer.indexer_oracle import FORMATS, any_values, grid, scores
from tests.test_kernels.indexer.indexer_sm100 import Chosen, on, run_contiguous, run_paged
from tests.test_kernels.oracle import Float64

pytestmark = pytest.mark.arch("sm_100")
ONE_SCHEDULE = pytest.mark.schedules("random 1")
FMTS = pytest.mark.parametrize("fmt", FORMATS)

# Contexts of no key, of one key, and around the ends of pages and key tiles.
EDGES = ((0,), (1,), (63,), (64,), (65,), (127,), (128,), (129,), (300,))
PAGED = {
    "one head": (Case(((0,), (1,), (15,), (16,), (17,), (140,)), heads=1), ("nvfp4",)),
    "8 heads": (Case(((5, 6, 7), (0, 1, 130)), heads=8, next_n=3), ("mxfp4",)),
    "12 heads": (
        Case(((30, 129), (1, 0)), heads=12, head_dim=256, next_n=2, block_size=32),
        ("nvfp4", "mxfp4"),
    ),
    "32 heads": (Case(((150, 3),), heads=32, head_dim=128, next_n=2), ("fp8",)),
    "64 heads": (Case(EDGES, heads=64, head_dim=128, block_size=64), FORMATS),
    "64 heads, 2 queries": (
        Case(((130, 131), (40, 9)), heads=64, head_dim=128, next_n=2, block_size=128),
        ("nvfp4",),
    ),
    "128 heads": (
        Case(((90, 2), (33, 257)), heads=128, head_dim=64, next_n=2, block_size=256),
        ("nvfp4", "bf16"),
    ),
    "heads of 256": (Case(((200,),), heads=64, head_dim=256, block_size=64), ("fp8", "bf16")),
}
PAGED_CASES = [(name, fmt) for name, (_, fmts) in PAGED.items() for fmt in fmts]


@ONE_SCHEDULE
@pytest.mark.parametrize(("name", "fmt"), PAGED_CASES)
def test_paged(name: str, fmt: str, op_device: torch.device) -> None:
    run_paged(PAGED[name][0].problem(fmt), op_device)


def ranges(count: int, keys: int) -> tuple[np.ndarray, np.ndarray]:
    """Random ranges of keys: some are empty, one has one key, one has all keys."""
    rng = np.random.default_rng(2)
    ks, ke = np.sort(rng.integers(0, keys + 1, size=(2, count)), axis=0).astype(np.int32)
    ke[1] = ks[1]
    ks[2], ke[2] = 128, 129
    ks[3], ke[3] = 0, keys
    return ks, ke


def check_prefill(
    fmt: str, heads: int, head_dim: int, count: int, keys: int, device: torch.device
) -> None:
    rng = np.random.default_rng(1)
    q, k = grid(fmt, rng, count, heads, head_dim), grid(fmt, rng, keys, head_dim)
    weights = rng.integers(-3, 4, size=(count, heads)).astype(np.float64)
    ks, ke = ranges(count, keys)
    arguments = {
        "q": q.data, "q_scales": q.scales, "k": k.data, "k_scales": k.scales,
        "weights": torch.from_numpy(weights).float(), "ks": torch.tensor(ks),
        "ke": torch.tensor(ke), "fmt": fmt,
    }  # fmt: skip
    wanted = np.full((count, keys), -np.inf)
    for row in range(count):
        seen = slice(ks[row], ke[row])
        wanted[row, seen] = scores(q.values[row], k.values[seen], weights[row])
    found = run_logits(**on(device, arguments))
    np.testing.assert_array_equal(found.cpu().double().numpy(), wanted)


# Groups of 3 and of 12 queries, all incomplete.
PREFILLS = [
    ("nvfp4", 64, 128, 7, 300),
    ("mxfp4", 64, 128, 7, 300),
    ("fp8", 64, 128, 5, 200),
    ("bf16", 32, 64, 8, 257),
    ("nvfp4", 12, 64, 17, 150),
    ("mxfp4", 8, 64, 5, 151),
    ("nvfp4", 128, 128, 4, 150),
]


@ONE_SCHEDULE
@pytest.mark.parametrize(("fmt", "heads", "head_dim", "count", "keys"), PREFILLS)
def test_prefill(
    fmt: str, heads: int, head_dim: int, count: int, keys: int, op_device: torch.device
) -> None:
    check_prefill(fmt, heads, head_dim, count, keys, op_device)


# --- the ring and the accumulators go round, keys are split ---------------------------------------

PINGPONG = Chosen(ScoreTile("nvfp4", 64, 16, 1, 1, pingpong=2, doubled=5, max_stages=3), 2)
FACTORED = Chosen(ScoreTile("fp8", 64, 16, 1, 1, pingpong=2, max_stages=3), 2)
GROUPS = Chosen(ScoreTile("fp8", 64, 8, 2, 3, max_stages=2))
MANY = Chosen(ScoreTile("mxfp4", 128, 16, 1, 2, doubled=8, max_stages=4), 7)
LONG = Case(((1300,), (0,), (700,)), heads=16, block_size=64)


def test_every_schedule_paged(op_device: torch.device, monkeypatch: pytest.MonkeyPatch) -> None:
    PINGPONG.use(monkeypatch)
    run_paged(LONG.problem("nvfp4"), op_device)


def test_sets_that_alternate_and_read_factors(
    op_device: torch.device, monkeypatch: pytest.MonkeyPatch
) -> None:
    FACTORED.use(monkeypatch)
    run_paged(LONG.problem("fp8"), op_device)


@ONE_SCHEDULE
@pytest.mark.parametrize("stages", [2, 3, 5])
@pytest.mark.parametrize("fmt", ["nvfp4", "mxfp4"])
def test_two_scale_sets(
    fmt: Format, stages: int, op_device: torch.device, monkeypatch: pytest.MonkeyPatch
) -> None:
    tile = ScoreTile(fmt, 64, 16, pingpong=2, max_stages=stages, scale_sets=2)
    Chosen(tile).use(monkeypatch)
    run_paged(LONG.problem(fmt), op_device)


def test_every_schedule_contiguous(
    op_device: torch.device, monkeypatch: pytest.MonkeyPatch
) -> None:
    GROUPS.use(monkeypatch)
    check_prefill("fp8", 8, 64, 8, 700, op_device)


@ONE_SCHEDULE
def test_more_splits_than_key_tiles(
    op_device: torch.device, monkeypatch: pytest.MonkeyPatch
) -> None:
    MANY.use(monkeypatch)
    case = Case(((600, 601), (129, 3)), heads=16, head_dim=128, next_n=2)
    run_paged(case.problem("mxfp4"), op_device)


# --- numbers ----------------------------------------------------------------------------------


@ONE_SCHEDULE
@FMTS
def test_any_values(fmt: str, op_device: torch.device) -> None:
    """Values off the grid stay within the bound of float32 sums of D products and H heads.

    Doubling relu costs no bit; FP8 scales are powers of two.
    """
    case = Case(((300,),), heads=64, head_dim=128, block_size=64)
    problem = case.problem(fmt, any_values)
    arguments = on(op_device, problem.paged())
    found = run_logits(**arguments).cpu().double().numpy()[0, :300]
    keys: Float64 = problem.keys[0].values
    products = np.abs(problem.q.values[0, 0]) @ np.abs(keys.T)
    bound = (128 + 64 + 2) * 2.0**-24 * (np.abs(problem.weights[0]) @ products)
    assert (np.abs(found - problem.expected()[0]) <= bound).all()


@ONE_SCHEDULE
@FMTS
def test_nan_in_a_key(fmt: str, op_device: torch.device) -> None:
    """A key of NaN scores NaN; other scores are unchanged."""
    problem = Case(((200,),), heads=64, head_dim=128, block_size=64).problem(fmt)
    clean = run_paged(problem, op_device).cpu()
    poisoned = problem.keys[0]
    part = poisoned.data if poisoned.scales is None else poisoned.scales
    part[133].view(-1).view(torch.uint8).fill_(0xFF)
    found = run_logits(**on(op_device, problem.paged())).cpu()
    assert found.isnan().nonzero().tolist() == [[0, 133]]
    found[0, 133] = clean[0, 133]
    assert torch.equal(found, clean)


@ONE_SCHEDULE
def test_fp8_scales_in_the_weights(op_device: torch.device) -> None:
    problem = Case(((40, 150),), heads=32, head_dim=128, next_n=2).problem("fp8")
    expected = run_paged(problem, op_device)
    arguments = problem.paged()
    folded = arguments["weights"] * arguments["q_scales"].view(arguments["weights"].shape)
    changed = arguments | {"q_scales": None, "weights": folded}
    assert torch.equal(run_logits(**on(op_device, changed)), expected)


# --- memory that must not be read, and empty inputs -------------------------------------------


@ONE_SCHEDULE
@pytest.mark.parametrize("unused", [0x00, 0x7F])
@pytest.mark.parametrize("fmt", ["nvfp4", "fp8"])
def test_garbage_in_unused_slots(unused: int, fmt: str, op_device: torch.device) -> None:
    """Unused cache slots hold anything; table entries past a context are not followed."""
    case = Case(EDGES, heads=64, head_dim=128, block_size=64)
    run_paged(case.problem(fmt), op_device, unused=unused)


@ONE_SCHEDULE
def test_pages_apart(op_device: torch.device) -> None:
    """A cache that is a strided view of a larger cache."""
    run_paged(PAGED["64 heads"][0].problem("nvfp4"), op_device, gap=48)


@ONE_SCHEDULE
def test_nothing_to_score(op_device: torch.device) -> None:
    def none(*lens: int, next_n: int = 1) -> dict[str, Any]:
        problem = Case(((0,) * next_n,) * len(lens), next_n=next_n).problem("nvfp4")
        return on(op_device, problem.paged())

    assert run_logits(**none()).shape == (0, 3)
    assert run_logits(**none(0, 0)).isneginf().all()
    without_pages = none(0, 0)
    without_pages["cache"] = without_pages["cache"][:0]
    assert run_logits(**without_pages).isneginf().all()
    contiguous = Case(((0,), (0,))).problem("nvfp4").contiguous()
    assert run_logits(**on(op_device, contiguous)).shape == (2, 0)
    seen = Case(((20,),)).problem("nvfp4").contiguous()
    nobody = {name: seen[name][:0] for name in ("q", "q_scales", "weights", "ks", "ke")}
    assert run_logits(**on(op_device, seen | nobody)).shape == (0, 20)
    run_contiguous(Case(((0,), (20,))).problem("nvfp4"), op_device)


@ONE_SCHEDULE
def test_errors(op_device: torch.device) -> None:
    def refuses(match: str, gap: int = 0, **changed: Any) -> None:
        arguments = on(op_device, Case(((20,),), **changed).problem("nvfp4").paged(gap=gap))
        with pytest.raises(InvalidArgument, match=match):
            run_logits(**arguments)

    refuses("q: D is 96, must be one of 64, 128, 256 on sm_100", head_dim=96)
    refuses("q: has 0 heads, must have from 1 to 128 on sm_100", heads=0)
    refuses("q: has 129 heads, must have from 1 to 128 on sm_100", heads=129)
    refuses("block_size: is 24, must be a power of two of at least 16 on sm_100", block_size=24)
    refuses("block_size: is 8, must be a power of two of at least 16 on sm_100", block_size=8)
    if op_device.type == "cpu":
        with standing_in("cpu", "sm_103"):
            refuses("q: D is 96, must be one of 64, 128, 256 on sm_103", head_dim=96)
    refuses("cache: pages are 581 bytes apart, must be a multiple of 16 on sm_100", gap=5)
    problem = Case(((20,),)).problem("nvfp4")
    arguments = on(op_device, problem.paged())
    shifted = torch.zeros(arguments["cache"].numel() + 8, dtype=torch.uint8, device=op_device)
    moved = shifted[8:].view(arguments["cache"].shape)
    with pytest.raises(
        InvalidArgument, match="cache: is misaligned by 8 bytes, must be 16-byte aligned"
    ):
        run_logits(**arguments | {"cache": moved})
    arguments = on(op_device, Case(((20,),), heads=0).problem("nvfp4").contiguous())
    with pytest.raises(InvalidArgument, match="q: has 0 heads"):
        run_logits(**arguments)
