"""Mutants of decode attention, and the finding expected for each."""

from tests.mutants import WRONG, Mutant
from tests.mutants.kernels import Room
from tests.test_kernels.attention.decode.decode_cases import Case, case
from tests.test_kernels.attention.decode.decode_shapes import Chosen

KERNEL = Room("nvfp4_kernels.attention.decode.sm90")

# Rings of two stages go round more than once; the free slots of the last page hold NaN.
ALONE = Chosen(1, max_stages=2), case(277, 3, query_heads=4, heads=1, window=270)
CLUSTER = Chosen(2, max_stages=2), case(300, 35, query_heads=12, heads=1, sinks=True)
# Steps of 32 keys: the last is full or half empty.
WIDE = Chosen(1, keys=32, max_stages=2), case(512, 40, query_heads=4, heads=1)
# Rows of 64 bytes.
NARROW = Chosen(1, max_stages=3), case(150, 19, query_heads=4, heads=1, head_dim=96, fp8=True)
# E4M3 keys and values, bfloat16 queries of two head tiles.
FP8 = Chosen(1, max_stages=3), case(150, 19, query_heads=12, heads=1, fp8=True)


def edited(
    module: str, right: str, wrong: str, caught: str, on: tuple[Chosen, Case] = ALONE
) -> Mutant:
    return Mutant(KERNEL.edited(module, right, wrong), caught, on)


WARP_SYNC = "ptx.bar_warp_sync(cute.arch.FULL_MASK)"
SYNC_CLUSTER = """            ptx.barrier_cluster_arrive()
            ptx.barrier_cluster_wait()
"""
MUTANTS = {
    # The ring of stages.
    "stage not waited for": edited(
        "mainloop", "wait(ring.full.subview(index % stages), index // stages)", "pass", "DataRace"
    ),
    "page of the step after": edited(
        "mainloop", "index + (stages + 1))", "index + (stages + 2))", WRONG
    ),
    "bytes expected twice": edited(
        "loader", "(full, tile.stage_bytes)", "(full, 2 * tile.stage_bytes)", "Deadlock"
    ),
    "first row of a page only": edited(
        "loader",
        "self._key(work, index, box) % self.variant.page_size",
        "0",
        WRONG,
        (ALONE[0], case(70, page_size=32)),
    ),
    "both boxes of a step in one place": edited(
        "loader", "(stage * tile.boxes + box)", "(stage * tile.boxes)", "DataRace", WIDE
    ),
    "values of a step's first box twice": edited(
        "mainloop",
        "[self._load(box, steps + step",
        "[self._load(boxes[0], steps + step",
        WRONG,
        WIDE,
    ),
    "a page for a box past the last key": edited(
        "loader", "Int32(-1)", "Int32(0)", WRONG, (WIDE[0], case(9))
    ),
    # The token that is stored.
    "stale key kept": edited(
        "token",
        "stage.store(new_key.bitcast(Float32), self._stage_word(lane, row), alignment=size)",
        "pass",
        WRONG,
    ),
    "value not stored": edited(
        "token",
        "target.store(new_value, offset + (lane + pieces) * VECTOR, alignment=size)",
        "pass",
        WRONG,
    ),
    "values past the last kept": edited(
        "token",
        "stage.store(zeros, self._stage_word(lane + pieces, after), alignment=size)",
        "pass",
        WRONG,
    ),
    "values past the last kept in a second box": edited(
        "token", "(row // KEYS + 1) * KEYS", "KEYS", WRONG, (WIDE[0], case(30))
    ),
    "token of a full step": edited(
        "scheduler", "tile.boxes >= last", "tile.boxes > last", WRONG, WIDE
    ),
    "lanes do not sync after the token": edited("token", WARP_SYNC, "pass", "DataRace"),
    # Softmax.
    "keys past the last seen": edited(
        "mainloop", "seen = key < work.end", "seen = key >= 0", WRONG
    ),
    "a key before the window seen": edited(
        "mainloop", "key >= work.begin", "key >= work.begin - 1", WRONG
    ),
    "maxima of two lanes of four": edited(
        "mainloop", "for distance in (1, 2):", "for distance in (1,):", WRONG
    ),
    "factors of other heads": edited("mainloop", "lane + 4 * c", "lane", WRONG),
    "no swizzle": edited("token", "(inside ^ (step % per_chunk))", "inside", WRONG),
    # E4M3 keys and values.
    "keys' scale left out": edited(
        "kernel", "logits.scale * cache.scales[0]", "logits.scale", WRONG, FP8
    ),
    "values' scale left out": edited("merge", "inverse * v_scale", "inverse", WRONG, FP8),
    "values' scale for keys": edited(
        "kernel", "logits.scale * cache.scales[0]", "logits.scale * cache.scales[1]", WRONG, FP8
    ),
    "new key divided by the values' scale": edited(
        "token",
        "self._as_cached(key, cache.scales[0])",
        "self._as_cached(key, cache.scales[1])",
        WRONG,
        FP8,
    ),
    "new value divided by the keys' scale": edited(
        "token",
        "self._as_cached(value, cache.scales[1])",
        "self._as_cached(value, cache.scales[0])",
        WRONG,
        FP8,
    ),
    "queries in the order of 16-bit keys": edited(
        "token", "lane % 4 * 4 + half % 2 * 2", "lane % 4 * 2 + half % 2 * 8", WRONG, FP8
    ),
    "keys of the other half": edited(
        "mainloop", "each[2 * key_tile + half]", "each[2 * key_tile + 1 - half]", WRONG, FP8
    ),
    "values of the other half": edited(
        "mainloop", "each[half::2]", "each[1 - half :: 2]", WRONG, FP8
    ),
    "values' bytes not permuted": edited(
        "mainloop", "EVEN_THEN_ODD = 0x3120", "EVEN_THEN_ODD = 0x3210", WRONG, FP8
    ),
    "results in the order of 16-bit values": edited(
        "merge",
        "lane // 4 * 2 + half if self.tile.fp8 else",
        "half * 8 + lane // 4 if True else",
        WRONG,
        FP8,
    ),
    "new values where keys are": edited(
        "token", "piece // 2, row % KEYS) + piece % 2 * 2", "piece // 2, row % KEYS)", WRONG, FP8
    ),
    "queries' factors of other heads": edited(
        "mainloop", "queries.factors[head_tile]", "queries.factors[0]", WRONG, FP8
    ),
    "queries' largest of two lanes of four": edited(
        "token", "for distance in (1, 2):", "for distance in (1,):", WRONG, FP8
    ),
    "queries' factor of the wrong exponent": edited(
        "token",
        "exponent - QUERY_EXPONENT << 23",
        "exponent - QUERY_EXPONENT + 1 << 23",
        WRONG,
        FP8,
    ),
    "weights beyond float16": edited("mainloop", '"float16": 15', '"float16": 17', WRONG, FP8),
    "swizzle of wide rows": edited(
        "token", "row // (ROW_BYTES // tile.chunk_bytes)", "row", WRONG, NARROW
    ),
    "swizzle of one row in four": edited(
        "token",
        "ROW_BYTES // tile.chunk_bytes)",
        "2 * ROW_BYTES // tile.chunk_bytes)",
        WRONG,
        NARROW,
    ),
    # The merge of splits.
    "each warp the barriers of the next": edited(
        "kernel",
        "barriers.subview(warp * tile.stages)",
        "barriers.subview((warp + 1) * tile.stages)",
        "ArrayOverrun",
    ),
    "parts not waited for": edited("merge", "        self._sync()\n", "", "DataRace"),
    "parts of a cluster not waited for": edited(
        "merge",
        f"if self.tile.splits > 1:\n{SYNC_CLUSTER}",
        f"if self.tile.splits > 1:\n{' ' * 12}ptx.barrier_cta_sync()\n",
        "UnstartedPeer",
        CLUSTER,
    ),
    "gone while others read": edited(
        "merge",
        "            cute.arch.cluster_arrive_relaxed()\n            ptx.barrier_cluster_wait()\n",
        "            pass\n",
        "ExitedPeer",
        CLUSTER,
    ),
    "sums of a lane's own keys": edited(
        "merge", "range_constexpr(1, 3)", "range_constexpr(1, 2)", WRONG
    ),
    "sink left out": edited("merge", "if self.variant.sinks else", "if False else", WRONG, CLUSTER),
}
