"""Choice of a problem's candidate buffers, which never overflow."""

import itertools
from typing import get_args

import pytest

from nvfp4_kernels.indexer.sm100.best_keys.choose import Choice, choose_config
from nvfp4_kernels.indexer.sm100.best_keys.tile import Selection
from nvfp4_kernels.indexer.sm100.choose import ScoreProblem
from nvfp4_kernels.indexer.sm100.tile import HEAD_DIMS, KEYS, Format, ScoreTile
from nvfp4_kernels.sm100.limits import SMS

SHARED = 227 * 1024
FORMATS: tuple[Format, ...] = get_args(Format)
HEADS = (1, 8, 12, 16, 32, 33, 64, 65, 128)
MOST = 4096


def chosen(
    fmt: Format = "nvfp4",
    head_dim: int = 128,
    heads: int = 64,
    sequences: int = 1,
    queries: int = 1,
    keys: int = 131072,
    top_k: int = 2048,
) -> Choice:
    problem = ScoreProblem(fmt, head_dim, heads, sequences, queries, keys)
    choice = choose_config(problem, top_k, SMS)
    assert choice is not None
    return choice


@pytest.mark.parametrize("top_k", [1, 100, 2048, MOST])
@pytest.mark.parametrize("head_dim", HEAD_DIMS)
def test_everything_fits(head_dim: int, top_k: int) -> None:
    for fmt, heads, queries in itertools.product(FORMATS, HEADS, (1, 2, 3, 50)):
        if (fmt, head_dim, heads > 64, top_k) == ("bf16", 256, True, MOST):
            continue  # refused, see below
        tile, selection = _parts(chosen(fmt, head_dim, heads, 1, queries, 5000, top_k))
        used = tile.fixed_bytes + tile.visitor_bytes + tile.stages * tile.stage_bytes
        assert used <= SHARED
        assert tile.stages >= 2
        assert tile.visitor_bytes >= 8 * tile.queries * selection.capacity
        assert selection.max_entries(tile) >= top_k
        assert tile.queries < 2 * queries or tile.queries == 1
        assert selection.words % selection.topk_tile(tile).threads == 0


def _parts(choice: Choice) -> tuple[ScoreTile, Selection]:
    return choice.tile, choice.selection


def test_what_does_not_fit() -> None:
    problem = ScoreProblem("bf16", 256, 128, 1, 1, 5000)
    assert choose_config(problem, MOST, SMS) is None
    assert choose_config(problem, 2048, SMS) is not None


@pytest.mark.parametrize("pingpong", [1, 2])
@pytest.mark.parametrize("sync_phases", [1, 2, 4])
def test_no_more_are_appended_between_checks(pingpong: int, sync_phases: int) -> None:
    """The bound on appended candidates holds for any number of key tiles, if all are appended."""
    tile = ScoreTile("nvfp4", 128, 64, pingpong=pingpong)
    bound = Selection(4096, sync_phases, 256, True).max_appended(tile)
    reached, phase = 0, tile.accumulators
    for tiles in range(1, 50):
        checks = list(range(phase * sync_phases, tiles, phase * sync_phases))
        ends = itertools.pairwise([0, *checks, tiles])
        reached = max(reached, max(KEYS * (end - begin) for begin, end in ends))
    assert reached == bound


def test_splits_leave_most_keys_out() -> None:
    """One CTA per row where rows are many; a split sees at least twice ``top_k`` keys."""
    few = chosen()
    assert 16 <= few.splits <= 131072 // (2 * 2048)
    assert not few.selection.whole
    many = chosen(queries=4096, keys=32768)
    assert many.splits == 1
    assert many.selection.whole
    short = chosen(keys=8192)
    assert short.splits == 1
    assert chosen(keys=0).splits == 1


def test_queries_of_a_sequence_share_keys_that_caches_do_not_hold() -> None:
    for fmt in ("nvfp4", "fp8"):
        assert chosen(fmt, sequences=64, queries=2).tile.queries == 2
