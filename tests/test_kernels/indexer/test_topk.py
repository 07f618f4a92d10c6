"""``indexer_topk`` on GPUs: the exact keys, for any values and any split of a row."""

import math
from importlib import import_module

import pytest
import torch

from nvfp4_kernels import InvalidArgument, indexer_topk
from nvfp4_kernels.indexer.topk.choose import choose_config
from nvfp4_kernels.indexer.topk.tile import (
    MAX_CLUSTER,
    MAX_COLUMNS,
    MAX_SHARED_BYTES,
    MAX_SLICE,
    TopkTile,
    bitmap_words,
)
from nvfp4_kernels.runtime import compile as compiler
from tests import devices
from tests.emulator import EAGER, STANDARD
from tests.test_kernels.indexer.indexer_oracle import padded
from tests.test_kernels.indexer.topk_cases import (
    ALONE,
    COLUMNS,
    EIGHT,
    PAIR,
    ROWS,
    best,
    check,
    ints,
    rows_of,
    use,
)
from tests.test_kernels.rounds import topk

EVERY_SCHEDULE = pytest.mark.schedules(*(schedule.name for schedule in STANDARD))
pytestmark = pytest.mark.schedules("random 1")
Patch = pytest.MonkeyPatch


@pytest.mark.parametrize("name", ROWS)
@pytest.mark.parametrize("top_k", [100, 1000], ids=["sampled", "whole"])
def test_values(name: str, top_k: int, op_device: torch.device, monkeypatch: Patch) -> None:
    """Small top-k samples a threshold; with large top-k the buffer overflows repeatedly."""
    use(monkeypatch, PAIR)
    check(rows_of(ROWS[name], rows=1), ints(COLUMNS), top_k, op_device)


@pytest.mark.parametrize("name", ["normal", "few values", "ascending", "mostly NaN", "hot"])
@pytest.mark.parametrize("tile", [ALONE, EIGHT], ids=["one CTA", "8 CTAs"])
def test_clusters(name: str, tile: TopkTile, op_device: torch.device, monkeypatch: Patch) -> None:
    use(monkeypatch, tile)
    columns = COLUMNS if tile is ALONE else 20_000
    check(rows_of(ROWS[name], 1, columns), ints(columns), 200, op_device)


ROUNDS = {
    "one CTA": (TopkTile(128, 1, 2048, bitmap_words(13_000, 1, 128)), 13_000),
    "two CTAs": (TopkTile(128, 2, 2048, bitmap_words(26_000, 2, 128)), 26_000),
}


@pytest.mark.parametrize("name", ROUNDS)
def test_rounds(name: str, op_device: torch.device, monkeypatch: Patch) -> None:
    """Each CTA loads in several rounds; its buffer holds less than a third of the slice."""
    tile, columns = ROUNDS[name]
    assert topk(tile, columns).enough
    use(monkeypatch, tile)
    check(rows_of(ROWS["ascending"], 1, columns), ints(columns), 1000, op_device)


@EVERY_SCHEDULE
def test_sampled_in_every_schedule(op_device: torch.device, monkeypatch: Patch) -> None:
    use(monkeypatch, PAIR)
    check(rows_of(ROWS["normal"]), ints(COLUMNS, COLUMNS - 1), 100, op_device)


@EVERY_SCHEDULE
def test_overflow_in_every_schedule(op_device: torch.device, monkeypatch: Patch) -> None:
    use(monkeypatch, PAIR)
    check(rows_of(ROWS["few values"], rows=1), ints(COLUMNS), 1000, op_device)


@pytest.mark.parametrize("top_k", [1, 7, 8])
def test_lengths(top_k: int, op_device: torch.device, monkeypatch: Patch) -> None:
    """Lengths of zero, one, around ``top_k``, and all; columns past them hold NaN or inf."""
    use(monkeypatch, PAIR)
    lens = ints(0, 1, top_k, top_k + 1, 3, 130, 4097, 5000)
    logits = rows_of(ROWS["normal"], len(lens), 5000)
    for row, length in enumerate(lens.tolist()):
        logits[row, length:] = math.inf if row % 2 else math.nan
    check(logits, lens, top_k, op_device)


@pytest.mark.parametrize("apart", [5001, 5002, 5004])
def test_rows_anywhere(apart: int, op_device: torch.device, monkeypatch: Patch) -> None:
    """Rows and windows start at any multiple of 4 bytes; memory around them is not read."""
    use(monkeypatch, PAIR)
    starts, lens = ints(0, 1, 2, 3, 4990, 17), ints(4990, 4600, 4500, 70, 3, 4097)
    logits = torch.full((6, apart), math.nan)[:, 5:4998]
    for row, (start, length) in enumerate(zip(starts.tolist(), lens.tolist(), strict=True)):
        logits[row] = math.inf
        logits[row, start : start + length] = torch.randn(length)
    check(logits, lens, 50, op_device, starts)
    check(logits, lens.clamp(max=2000), 50, op_device)


def test_most_keys(op_device: torch.device, monkeypatch: Patch) -> None:
    use(monkeypatch, TopkTile(1024, 2, 5248, bitmap_words(12_000, 2, 1024)))
    check(rows_of(ROWS["normal"], 1, 12_000), ints(12_000), 4096, op_device)


@pytest.mark.parametrize("top_k", [1, 2048])
def test_own_configuration(top_k: int, op_device: torch.device) -> None:
    """Top-k in the default configuration."""
    check(rows_of(ROWS["normal"], 3, 20_000), ints(20_000, 19_997, 2049), top_k, op_device)


@pytest.mark.parametrize("name", ["normal", "descending"])
def test_a_threshold_that_is_too_high(
    name: str, op_device: torch.device, monkeypatch: Patch
) -> None:
    """If the sampled threshold is too high, the row is read again."""
    use(monkeypatch, PAIR)
    sample = import_module("nvfp4_kernels.indexer.topk.sample")
    monkeypatch.setattr(sample, "_rank", lambda tile, row, top_k: top_k * 0 + 1)
    compiler.compiled.cache_clear()
    try:
        with devices.other_kernels():
            check(rows_of(ROWS[name]), ints(COLUMNS, 8999), 100, op_device)
    finally:
        compiler.compiled.cache_clear()


def test_no_rows(op_device: torch.device) -> None:
    indices, valid = indexer_topk(torch.zeros(0, 8).to(op_device), ints().to(op_device), 3)
    assert indices.shape == (0, 3)
    assert valid.shape == (0,)


def test_dependent_launches(op_device: torch.device, monkeypatch: Patch) -> None:
    """A second launch may start before the first has ended, and reads the first one's result."""
    use(monkeypatch, PAIR)
    logits = rows_of(ROWS["normal"])
    first, valid = indexer_topk(logits.to(op_device), ints(9000, 9000).to(op_device), 100)
    second, _ = indexer_topk(logits.to(op_device), valid, 100)
    assert second.tolist() == [list(range(100))] * 2
    assert first.tolist() != second.tolist()


def test_read_once(monkeypatch: Patch) -> None:
    """Logits are read once, except the sample and values above the bound, which come from cache."""
    columns = 131_072
    with devices.emulated_ops(EAGER) as gpu:
        use(monkeypatch, choose_config(64, columns, 2048, 132))
        logits = rows_of(ROWS["normal"], 1, columns)
        check(logits, ints(columns), 2048, torch.device("cpu"))
        counted = gpu.launches[-1].counters.nbytes
        assert counted["global read"] < 1.2 * logits.nbytes
        assert counted["global write"] == 4 * 2049


@pytest.mark.parametrize("length", [0, 5, 2048])
def test_short_rows_are_not_read(length: int, monkeypatch: Patch) -> None:
    with devices.emulated_ops(EAGER) as gpu:
        check(rows_of(ROWS["normal"], 1, 3000), ints(length), 2048, torch.device("cpu"))
        cluster = choose_config(1, 3000, 2048, 148).cluster
        launch = gpu.launches[-1]
        threads = launch.counters.nbytes["global read"] / 4 / cluster
        assert threads <= 1024  # each thread reads the length


def test_too_many_columns(op_device: torch.device) -> None:
    logits = torch.zeros(1).to(op_device).expand(1, MAX_COLUMNS + 1)[:0]
    logits = logits.as_strided((0, MAX_COLUMNS + 1), (MAX_COLUMNS + 1, 1))
    with pytest.raises(InvalidArgument, match="logits: has 6291457 columns, must have at most"):
        indexer_topk(logits, ints().to(op_device), 3)


@pytest.mark.parametrize("sms", [132, 148])
@pytest.mark.parametrize("top_k", [1, 2048, 2049, 4096])
@pytest.mark.parametrize("columns", [1, 4096, 131_072, 1 << 20, MAX_COLUMNS])
@pytest.mark.parametrize("rows", [1, 8, 16, 17, 64, 67, 132, 5000])
def test_configurations(rows: int, columns: int, top_k: int, sms: int) -> None:
    tile = choose_config(rows, columns, top_k, sms)
    assert tile.shared_bytes <= MAX_SHARED_BYTES
    assert tile.capacity >= top_k + 1024, "else a full buffer might never take a batch"
    assert columns <= tile.cluster * MAX_SLICE
    if rows * tile.cluster > sms:
        assert tile.cluster == 1 or columns > tile.cluster // 2 * MAX_SLICE
    elif 2 * rows * tile.cluster <= sms:
        assert tile.cluster == MAX_CLUSTER


def test_configurations_of_decode() -> None:
    assert [choose_config(rows, 131_072, 2048, 132).cluster for rows in (1, 16, 32, 64, 128)] == [
        8, 8, 4, 2, 1
    ]  # fmt: skip


@pytest.mark.parametrize("top_k", [7, 500], ids=["sampled", "whole"])
def test_columns_with_ids(top_k: int, op_device: torch.device, monkeypatch: Patch) -> None:
    """Rows of at most ``top_k`` columns have ids as well."""
    use(monkeypatch, PAIR)
    logits, lens = rows_of(ROWS["few values"], 3), ints(COLUMNS, top_k, 3)
    ids = 3 * torch.arange(3 * COLUMNS, dtype=torch.int32).view(3, COLUMNS)
    topk_with_ids = import_module("nvfp4_kernels.indexer.topk.launch").topk_with_ids
    given = logits, ids, lens
    indices, valid = topk_with_ids(*(tensor.to(op_device) for tensor in given), top_k)
    assert valid.tolist() == [top_k, top_k, 3]
    for row, length in enumerate(lens.tolist()):
        expected = ids[row, best(logits[row, :length].numpy(), top_k)].tolist()
        assert indices[row].tolist() == padded(expected, top_k)
