"""Mutants of the weight-only GEMM of sm_90: each changes one place of its source."""

from dataclasses import dataclass

from nvfp4_kernels.gemm.sm90.tile import EpilogueConfig, Tile
from tests.test_kernels.mistakes import WRONG

ELEMENTS, BOXES = EpilogueConfig(), EpilogueConfig(boxes=True)


@dataclass(frozen=True)
class Product:
    """A tile, and a product of ``m`` tokens by ``n`` rows of ``k`` elements on ``sms`` SMs."""

    tile: Tile
    m: int
    n: int
    k: int
    output: EpilogueConfig = ELEMENTS
    ends: tuple[int, ...] = ()
    sms: int = 1


# The ring goes round more than once; except with split-K, a CTA has several tiles, the last ones
# ragged.
MANY = Product(Tile(64, max_stages=2), 130, 200, 256, BOXES)
DEEP = Product(Tile(64, k_tiles=2, max_stages=2), 70, 136, 512)
MANY_BOXES = Product(Tile(80, max_stages=2), 90, 136, 192, BOXES)
FEW = Product(Tile(8, k_tiles=2, max_stages=2), 12, 136, 640)
SHARDS = Product(
    Tile(16, max_stages=2), 9, 200, 192, EpilogueConfig(shards=3, bias="bfloat16"), ends=(72, 136)
)
PAIR = Product(Tile(16, 2, max_stages=2), 9, 136, 192)
APART = Product(Tile(96, 2, max_stages=2, weight_per_warpgroup=True), 150, 72, 192, BOXES)
FLOAT16 = Product(Tile(16, max_stages=2), 9, 136, 192, EpilogueConfig(act="float16"))
SPLIT = Product(Tile(8, split_k=2, max_stages=2), 5, 136, 512, sms=132)
SLICED = Product(Tile(8, warpgroups=2, slices=2, max_stages=2), 5, 136, 512, sms=132)
PRODUCTS = {
    "64": MANY,
    "64, two K tiles": DEEP,
    "80": MANY_BOXES,
    "8": FEW,
    "16, shards, bias": SHARDS,
    "16, pair": PAIR,
    "96, pair apart": APART,
    "16, float16": FLOAT16,
    "8, K in 2": SPLIT,
    "8, sliced": SLICED,
}


@dataclass(frozen=True)
class Mistake:
    """Source text that occurs once, its replacement, and the expected finding's class, or WRONG."""

    module: str
    right: str
    wrong: str
    caught: str
    on: Product = MANY


_STARTED = "ptx.barrier_cluster_wait()\n        for product in"
_WAIT_TURN = "0 if turned else SLOTS - 1"
MISTAKES = {
    # Main loop, wgmma.
    "last products not waited for": Mistake(
        "mma", "wait_group_sync_aligned(0)", "wait_group_sync_aligned(1)", "UnwaitedMma"
    ),
    "no wgmma fence": Mistake("mma", "ptx.wgmma_fence_aligned()", "pass", "MissingRegisterFence"),
    "products before not waited for": Mistake(
        "mma", "wait_group_sync_aligned(1)", "wait_group_sync_aligned(2)", "DataRace"
    ),
    "stage released under its products": Mistake(
        "mma", "self._release(ring, count - 1)", "self._release(ring, count)", "Deadlock"
    ),
    "last stage of a tile kept": Mistake(
        "mma",
        "self._release(ring, index * state.steps + end - 1)",
        "pass",
        "Deadlock",
    ),
    "half a step along K": Mistake("mma", "STEP_BYTES >> 4", "STEP_BYTES >> 5", WRONG),
    "parity of full": Mistake(
        "mma", "count // self.stages)", "count // self.stages + 1)", "ParityAliasing"
    ),
    "eight rows on, half as far": Mistake("wgmma", "1024 >> 4", "512 >> 4", WRONG),
    "no swizzle in the descriptor": Mistake(
        "wgmma", "_SWIZZLE_128B = 1", "_SWIZZLE_128B = 0", "wrong numbers"
    ),
    "one register set of A": Mistake("mma", "return 2 if", "return 1 if", "UnwaitedMma"),
    # Main loop, mma.sync.
    "halves of a step swapped": Mistake(
        "mma",
        "[s // 2][s % 2 * 2 : s % 2 * 2 + 2]",
        "[s // 2][2 - s % 2 * 2 : 4 - s % 2 * 2]",
        WRONG,
        FEW,
    ),
    "no swizzle of tokens": Mistake("warp_mma", "(piece ^ row) * 16", "piece * 16", WRONG, FEW),
    "half of the tokens' K again": Mistake("warp_mma", "half * 4 +", "0 * half +", WRONG, FEW),
    # Decoding of weights.
    "scales of upper and lower rows swapped": Mistake(
        "dequantize", "scales, i % 2", "scales, 1 - i % 2", WRONG
    ),
    "scales of the step before": Mistake(
        "dequantize", "rotation = 8 * odd", "rotation = 0 * odd", WRONG, FEW
    ),
    "scales of other rows": Mistake("dequantize", "8 + lane // 4", "8 + lane % 8", WRONG, FEW),
    "rotation by 6 for 2": Mistake(
        "dequantize", "_rotated(word, by) &", "_rotated(word, 6 if by == 2 else by) &", WRONG
    ),
    "a shift for a rotation": Mistake("dequantize", "by <= min(TARGETS)", "by <= 8", WRONG),
    "float16 shifted one less": Mistake(
        "dequantize", "_F16_SHIFT = 3", "_F16_SHIFT = 2", WRONG, FLOAT16
    ),
    "scales of float16 shifted": Mistake(
        "dequantize", "rotation + 7 - SCALE_BIT", "rotation + 6 - SCALE_BIT", WRONG, FLOAT16
    ),
    "half of what makes up for the scale": Mistake(
        "dequantize", "UNSCALE = 2.0**7", "UNSCALE = 2.0**6", WRONG
    ),
    # Loads.
    "bytes expected twice": Mistake(
        "loader", "(full, tile.stage_bytes)", "(full, 2 * tile.stage_bytes)", "Deadlock"
    ),
    "tokens' bytes not expected": Mistake(
        "loader",
        "(full, tile.stage_bytes)",
        "(full, tile.stage_bytes - tile.k_tiles * tile.tokens * ROW_BYTES)",
        "DataRace",
    ),
    "half of the arrivals of empty": Mistake(
        "loader", "return WARPGROUP *", "return WARPGROUP // 2 *", "DataRace"
    ),
    "twice the arrivals of empty": Mistake(
        "loader", "return WARPGROUP *", "return WARPGROUP * 2 *", "Deadlock"
    ),
    "stage not waited for": Mistake(
        "loader", "wait(ring.empty.subview(stage), count // stages - 1)", "pass", "DataRace"
    ),
    "rows beyond the last one fetched": Mistake(
        "loader", "row = cutlass.min(row, cute.ceil_div(n, TILE) - 1)", "pass", "OutOfBounds", FEW
    ),
    "tokens of another step": Mistake(
        "loader", "[0, tokens, step * tile.k_tiles]", "[0, tokens, step]", WRONG, FEW
    ),
    "weights of another step": Mistake("loader", "+ step * tile.k_tiles", "+ step", WRONG, DEEP),
    "one weight for both": Mistake(
        "loader",
        "weights[operand % len(weights)]",
        "weights[0]",
        WRONG,
        PAIR,
    ),
    # Split-K partials.
    "cluster not met before parts are sent": Mistake(
        "split_k", _STARTED, "pass\n        for product in", "BarrierMisuse", SPLIT
    ),
    "parts not waited for": Mistake(
        "split_k",
        "            ptx.barrier_cluster_wait()\n        else:",
        "            pass\n        else:",
        "UninitialisedRead",
        SPLIT,
    ),
    "parts handed over without an order": Mistake(
        "split_k",
        "ptx.barrier_cluster_arrive()\n\n    def wait",
        "ptx.barrier_cluster_arrive_relaxed()\n\n    def wait",
        "DataRace",
        SPLIT,
    ),
    "the load warp leaves before parts are there": Mistake(
        "split_k",
        "            ptx.barrier_cluster_arrive()\n            ptx",
        "            ptx",
        "BarrierMisuse",
        SPLIT,
    ),
    "one part left out": Mistake(
        "split_k", "range(self.tile.parts)", "range(self.tile.parts - 1)", WRONG, SPLIT
    ),
    # Slices: warpgroups that share rows.
    "a stage for both slices": Mistake(
        "kernel",
        "return self.tile.depth(self.output.shared_bytes(self.tile))",
        "return 3",
        "ParityAliasing",
        SLICED,
    ),
    "the first slice's steps for all": Mistake(
        "mma", "iteration * slices + own", "iteration * slices", "Deadlock", SLICED
    ),
    "slices not waited for": Mistake(
        "split_k",
        "ptx.barrier_cta_sync(BARRIER, thread_count=tile.warpgroups * WARPGROUP)",
        "pass",
        "UninitialisedRead",
        SLICED,
    ),
    "only one slice waited for": Mistake(
        "split_k",
        "thread_count=tile.warpgroups * WARPGROUP",
        "thread_count=WARPGROUP",
        "UninitialisedRead",
        SLICED,
    ),
    "one part of all slices": Mistake("split_k", "group % tile.slices", "0", "DataRace", SLICED),
    "one slice's rows for the other": Mistake(
        "split_k", "group // tile.slices", "group", "OutOfBounds", SLICED
    ),
    "arrivals of one slice for all": Mistake(
        "loader",
        "self.tile.warpgroups // self.tile.slices",
        "self.tile.warpgroups",
        "Deadlock",
        SLICED,
    ),
    # Copies between shared arrays.
    "a stage of weights loaded beyond the ring": Mistake(
        "loader",
        "target = (stage * tile.operands + index)",
        "target = (2 * stage * tile.operands + index)",
        "ArrayOverrun",
    ),
    "a stage of tokens loaded beyond the ring": Mistake(
        "loader",
        "ring.tokens.subview(stage * tile",
        "ring.tokens.subview(2 * stage * tile",
        "ArrayOverrun",
    ),
    "a stage of tokens multiplied beyond the ring": Mistake(
        "mma", "subview((stage * tile.k_tiles", "subview((2 * stage * tile.k_tiles", "ArrayOverrun"
    ),
    "a stage of weights read beyond the ring": Mistake(
        "mma",
        "operand = stage * tile.operands",
        "operand = 2 * stage * tile.operands",
        "ArrayOverrun",
    ),
    "sums spilled a row too far": Mistake(
        "epilogue",
        "scratch.subview(group * (tile.weights * chunk * PITCH))",
        "scratch.subview(group * (tile.weights * chunk * PITCH) + PITCH)",
        "ArrayOverrun",
        DEEP,
    ),
    "boxes stored eight rows too far": Mistake(
        "epilogue",
        "start // box % SLOTS) * (box * TILE)",
        "start // box % SLOTS) * (box * TILE) + 8 * TILE",
        "ArrayOverrun",
        MANY_BOXES,
    ),
    # Exchange between the warpgroups of a pair.
    "not met before sums are handed over": Mistake(
        "exchange", "self._sync()  # what lay", "pass  # what lay", "DataRace", APART
    ),
    "not met before sums are taken": Mistake(
        "exchange",
        "            self._sync()\n            for at",
        "            for at",
        "UninitialisedRead",
        APART,
    ),
    "only half of the pair met": Mistake(
        "exchange", "threads = self.tile.warpgroups", "threads = 1", "DataRace", APART
    ),
    "boxes not waited for before the exchange": Mistake(
        "epilogue", "            self.finish()\n", "", "DataRace", APART
    ),
    "halves of the tokens swapped": Mistake(
        "exchange", "_either(first, lower, upper)", "_either(first, upper, lower)", WRONG, APART
    ),
    "gate and up of a pair apart swapped": Mistake(
        "exchange",
        "[[_either(first, k, t) for k, t in pairs], [_either(first, t, k)",
        "[[_either(first, t, k) for k, t in pairs], [_either(first, k, t)",
        WRONG,
        APART,
    ),
    "one half of the tokens for both": Mistake(
        "epilogue", "group % tile.team * tile.own_tokens", "0", "DataRace", APART
    ),
    # Results stored as TMA boxes.
    "slots of boxes not waited for": Mistake(
        "epilogue", _WAIT_TURN, "SLOTS", "DataRace", MANY_BOXES
    ),
    "odd boxes: the slot not waited for": Mistake("epilogue", _WAIT_TURN, "SLOTS - 1", "DataRace"),
    "slot not met for": Mistake(
        "epilogue",
        "            self._sync(group)\n            for token in",
        "            for token in",
        "DataRace",
        MANY_BOXES,
    ),
    "box not met for": Mistake(
        "epilogue",
        "            self._sync(group)\n            if leader",
        "            if leader",
        "DataRace",
        MANY_BOXES,
    ),
    "no proxy fence before a box leaves": Mistake(
        "epilogue",
        "ptx.fence_proxy(ptx.Proxy.ASYNC_SHARED, space=ptx.SharedSpace.shared_cta)",
        "pass",
        "MissingProxyFence",
    ),
    "boxes not waited for at the end": Mistake(
        "epilogue", "ptx.cp_async_bulk_wait_group(0, read=True)", "pass", "UnfinishedStore"
    ),
    "rows of stmatrix swapped": Mistake("epilogue", "lane // 8 % 2", "(1 - lane // 8 % 2)", WRONG),
    "no swizzle of a box": Mistake("epilogue", "(piece ^ (row & 7)) * 8", "piece * 8", WRONG),
    # Results stored element by element.
    "not met before a tile's elements are spilled": Mistake(
        "epilogue",
        "            self._sync(group)\n            self._spill",
        "            self._spill",
        "DataRace",
        DEEP,
    ),
    "not met after elements are spilled": Mistake(
        "epilogue", "thread)\n            self._sync(group)", "thread)", "UninitialisedRead", DEEP
    ),
    "columns beyond the last one": Mistake(
        "epilogue", "if column < result.n:", "if column < result.n + 8:", "OutOfBounds", FEW
    ),
    "tokens beyond the last one": Mistake(
        "epilogue",
        "                    if at < result.m:",
        "                    if at < result.m + 1:",
        "OutOfBounds",
        FEW,
    ),
    "ends of shards ignored": Mistake(
        "epilogue", "shard += Int32(row >= factors.ends[end])", "pass", WRONG, SHARDS
    ),
    "shards end one row later": Mistake(
        "epilogue", "row >= factors", "row > factors", WRONG, SHARDS
    ),
    "bias ignored": Mistake(
        "epilogue",
        "[value + bias for value, bias in zip(values, biases, strict=True)]",
        "values",
        WRONG,
        SHARDS,
    ),
    "gate and up swapped": Mistake(
        "epilogue",
        "activated(values, self.output.activation or",
        "activated(values[::-1],",
        WRONG,
        PAIR,
    ),
    # Setup.
    "no fence of the barriers' initialisation": Mistake(
        "kernel", "ptx.fence_mbarrier_init()", "pass", "MissingProxyFence", SPLIT
    ),
    "CTA not met after the barriers' initialisation": Mistake(
        "kernel", "        ptx.barrier_cta_sync()\n", "", "BarrierMisuse"
    ),
}
