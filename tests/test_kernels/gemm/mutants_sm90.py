"""Mutants of the weight-only GEMM of sm_90: each changes one place of its source."""

from dataclasses import dataclass

from nvfp4_kernels.gemm.sm90.tile import EpilogueConfig, Tile
from tests.mutants import ANYTHING, WRONG, Mutant
from tests.mutants.kernels import Room

KERNEL = Room("nvfp4_kernels.gemm.sm90")

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
SPLIT_16 = Product(Tile(16, split_k=2, max_stages=2), 12, 136, 512, sms=132)
SLICED = Product(Tile(8, warpgroups=2, slices=2, max_stages=2), 5, 136, 512, sms=132)
SLICED_128 = Product(Tile(8, warpgroups=4, slices=2, max_stages=2), 5, 136, 512, sms=132)
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
    "16, K in 2": SPLIT_16,
    "8, sliced": SLICED,
    "8, sliced, 128 rows": SLICED_128,
}


def edited(module: str, right: str, wrong: str, caught: str, on: Product = MANY) -> Mutant:
    return Mutant(KERNEL.edited(module, right, wrong), caught, on)


_MET = "ptx.barrier_cta_sync(BARRIER, thread_count=tile.warpgroups * WARPGROUP)"
_STARTED = "self.wait_start()\n        for half in"
_WAIT_TURN = "0 if turned else SLOTS - 1"
MUTANTS = {
    # Main loop, wgmma.
    "last products not waited for": edited(
        "mma", "wait_group_sync_aligned(0)", "wait_group_sync_aligned(1)", "UnwaitedMma"
    ),
    "no wgmma fence": edited("mma", "ptx.wgmma_fence_aligned()", "pass", "MissingRegisterFence"),
    "products before not waited for": edited(
        "mma", "wait_group_sync_aligned(1)", "wait_group_sync_aligned(2)", "DataRace"
    ),
    "stage released under its products": edited(
        "mma", "self._release(ring, count - tile.slices)", "self._release(ring, count)", "Deadlock"
    ),
    "last stage of a tile kept": edited(
        "mma", "self._release(ring, index * state.steps + last)", "pass", "Deadlock"
    ),
    "half a step along K": edited("mma", "STEP_BYTES >> 4", "STEP_BYTES >> 5", WRONG),
    "parity of full": edited(
        "mma", "count // self.stages)", "count // self.stages + 1)", "ParityAliasing"
    ),
    "eight rows on, half as far": edited("wgmma", "1024 >> 4", "512 >> 4", WRONG),
    "no swizzle in the descriptor": edited(
        "wgmma", "_SWIZZLE_128B = 1", "_SWIZZLE_128B = 0", WRONG
    ),
    "one register set of A": edited("mma", "return 2 if", "return 1 if", "UnwaitedMma"),
    # Main loop, mma.sync.
    "halves of a step swapped": edited(
        "mma",
        "[s // 2][s % 2 * 2 : s % 2 * 2 + 2]",
        "[s // 2][2 - s % 2 * 2 : 4 - s % 2 * 2]",
        WRONG,
        FEW,
    ),
    "no swizzle of tokens": edited("warp_mma", "(piece ^ row) * 16", "piece * 16", WRONG, FEW),
    "half of the tokens' K again": edited("warp_mma", "half * 4 +", "0 * half +", WRONG, FEW),
    # Decoding of weights.
    "scales of upper and lower rows swapped": edited(
        "dequantize", "scales, i % 2", "scales, 1 - i % 2", WRONG
    ),
    "scales of the step before": edited(
        "dequantize", "rotation = 8 * odd", "rotation = 0 * odd", WRONG, FEW
    ),
    "scales of other rows": edited("dequantize", "8 + lane // 4", "8 + lane % 8", WRONG, FEW),
    "rotation by 6 for 2": edited(
        "dequantize", "_rotated(word, by) &", "_rotated(word, 6 if by == 2 else by) &", WRONG
    ),
    "a shift for a rotation": edited("dequantize", "by <= min(TARGETS)", "by <= 8", WRONG),
    "float16 shifted one less": edited(
        "dequantize", "_F16_SHIFT = 3", "_F16_SHIFT = 2", WRONG, FLOAT16
    ),
    "scales of float16 shifted": edited(
        "dequantize", "rotation + 7 - SCALE_BIT", "rotation + 6 - SCALE_BIT", WRONG, FLOAT16
    ),
    "half of what makes up for the scale": edited(
        "dequantize", "UNSCALE = 2.0**7", "UNSCALE = 2.0**6", WRONG
    ),
    # Loads.
    "bytes expected twice": edited(
        "loader", "(full, tile.stage_bytes)", "(full, 2 * tile.stage_bytes)", "Deadlock"
    ),
    "tokens' bytes not expected": edited(
        "loader",
        "(full, tile.stage_bytes)",
        "(full, tile.stage_bytes - tile.k_tiles * tile.tokens * ROW_BYTES)",
        "DataRace",
    ),
    "half of the arrivals of empty": edited(
        "loader", "return WARPGROUP *", "return WARPGROUP // 2 *", "DataRace"
    ),
    "twice the arrivals of empty": edited(
        "loader", "return WARPGROUP *", "return WARPGROUP * 2 *", "Deadlock"
    ),
    "stage not waited for": edited(
        "loader", "wait(ring.empty.subview(stage), count // stages - 1)", "pass", "DataRace"
    ),
    "rows beyond the last one fetched": edited(
        "loader", "row = cutlass.min(row, cute.ceil_div(n, TILE) - 1)", "pass", "OutOfBounds", FEW
    ),
    "tokens of another step": edited(
        "loader", "[0, tokens, step * tile.k_tiles]", "[0, tokens, step]", WRONG, FEW
    ),
    "weights of another step": edited("loader", "+ step * tile.k_tiles", "+ step", WRONG, DEEP),
    "one weight for both": edited(
        "loader", "weights[operand % len(weights)]", "weights[0]", WRONG, PAIR
    ),
    # Split-K partials.
    "cluster not met before parts are sent": edited(
        "split_k", _STARTED, "pass\n        for half in", "UnstartedPeer", SPLIT
    ),
    "parts not waited for": edited(
        "split_k", "wait(received, Int32(0), CLUSTER)", "pass", "UninitialisedRead", SPLIT
    ),
    "fewer bytes expected than arrive": edited(
        "split_k", "return 4 * parts", "return 2 * parts", ANYTHING, SPLIT
    ),
    "parts counted by the sender": edited(
        "split_k", "ptx.mapa(received, owner)", "ptx.mapa(received, rank)", ANYTHING, SPLIT
    ),
    "a CTA's own part not waited for": edited("split_k", _MET, "pass", "UninitialisedRead", SPLIT),
    "a CTA's own part sent too": edited(
        "split_k", "if owner == rank", "if owner == rank + 8", ANYTHING, SPLIT
    ),
    "tokens of two eights swapped": edited(
        "split_k", "index // 2 * 8", "(1 - index // 2) * 8", WRONG, SPLIT_16
    ),
    "a quarter's place by another row": edited(
        "split_k",
        "quarter = (vector % 4) ^",
        "quarter = (vector % 4 * self.width // 4) ^",
        ANYTHING,
        SPLIT,
    ),
    "parts expected after peers may send": edited(
        "kernel",
        "            split.init_barrier(received)\n            ptx.fence_mbarrier_init()\n",
        "            ptx.fence_mbarrier_init()\n            split.init_barrier(received)\n",
        "BarrierMisuse",
        SPLIT,
    ),
    "the load warp leaves before its peers have started": edited(
        "kernel",
        "            split.wait_start()\n        else:",
        "            pass\n        else:",
        ANYTHING,
        SPLIT,
    ),
    "one part left out": edited(
        "split_k", "range(self.tile.parts)", "range(self.tile.parts - 1)", WRONG, SPLIT
    ),
    # Slices: warpgroups that share rows.
    "a stage for both slices": edited(
        "kernel",
        "return self.tile.depth(self.output.shared_bytes(self.tile))",
        "return 3",
        "ParityAliasing",
        SLICED,
    ),
    "the first slice's steps for all": edited(
        "mma", "iteration * slices + own", "iteration * slices", "Deadlock", SLICED
    ),
    "slices not waited for": edited("split_k", _MET, "pass", "UninitialisedRead", SLICED),
    "only one slice waited for": edited(
        "split_k",
        "thread_count=tile.warpgroups * WARPGROUP",
        "thread_count=WARPGROUP",
        "UninitialisedRead",
        SLICED,
    ),
    "one part of all slices": edited("split_k", "group % tile.slices", "0", "DataRace", SLICED),
    "one slice's rows for the other": edited(
        "split_k", "group // tile.slices", "group", "DataRace", SLICED_128
    ),
    "arrivals of one slice for all": edited(
        "loader",
        "self.tile.warpgroups // self.tile.slices",
        "self.tile.warpgroups",
        "Deadlock",
        SLICED,
    ),
    # Copies between shared arrays.
    "a stage of weights loaded beyond the ring": edited(
        "loader",
        "target = (stage * tile.operands + index)",
        "target = (2 * stage * tile.operands + index)",
        "ArrayOverrun",
    ),
    "a stage of tokens loaded beyond the ring": edited(
        "loader",
        "ring.tokens.subview(stage * tile",
        "ring.tokens.subview(2 * stage * tile",
        "ArrayOverrun",
    ),
    "a stage of tokens multiplied beyond the ring": edited(
        "mma", "subview((stage * tile.k_tiles", "subview((2 * stage * tile.k_tiles", "ArrayOverrun"
    ),
    "a stage of weights read beyond the ring": edited(
        "mma",
        "operand = stage * tile.operands",
        "operand = 2 * stage * tile.operands",
        "ArrayOverrun",
    ),
    "sums spilled a row too far": edited(
        "epilogue",
        "scratch.subview(group * (tile.weights * chunk * PITCH))",
        "scratch.subview(group * (tile.weights * chunk * PITCH) + PITCH)",
        "ArrayOverrun",
        DEEP,
    ),
    "boxes stored eight rows too far": edited(
        "epilogue",
        "start // box % SLOTS * (box * TILE)",
        "start // box % SLOTS * (box * TILE) + 8 * TILE",
        "ArrayOverrun",
        MANY_BOXES,
    ),
    # Exchange between the warpgroups of a pair.
    "not met before sums are handed over": edited(
        "exchange", "self._sync()  # what lay", "pass  # what lay", "DataRace", APART
    ),
    "not met before sums are taken": edited(
        "exchange",
        "            self._sync()\n            for at",
        "            for at",
        "UninitialisedRead",
        APART,
    ),
    "only half of the pair met": edited(
        "exchange", "threads = self.tile.warpgroups", "threads = 1", "DataRace", APART
    ),
    "boxes not waited for before the exchange": edited(
        "epilogue", "            self.finish()\n", "", "DataRace", APART
    ),
    "halves of the tokens swapped": edited(
        "exchange", "_either(first, lower, upper)", "_either(first, upper, lower)", WRONG, APART
    ),
    "gate and up of a pair apart swapped": edited(
        "exchange",
        "[[_either(first, k, t) for k, t in pairs], [_either(first, t, k)",
        "[[_either(first, t, k) for k, t in pairs], [_either(first, k, t)",
        WRONG,
        APART,
    ),
    "one half of the tokens for both": edited(
        "epilogue", "group % tile.team * tile.own_tokens", "0", "DataRace", APART
    ),
    # Results stored as TMA boxes.
    "slots of boxes not waited for": edited(
        "epilogue", _WAIT_TURN, "SLOTS", "DataRace", MANY_BOXES
    ),
    "odd boxes: the slot not waited for": edited("epilogue", _WAIT_TURN, "SLOTS - 1", "DataRace"),
    "slot not met for": edited(
        "epilogue",
        "            self._sync(group)\n            of_box",
        "            of_box",
        "DataRace",
        MANY_BOXES,
    ),
    "box not met for": edited(
        "epilogue",
        "            self._sync(group)\n            if leader",
        "            if leader",
        "DataRace",
        MANY_BOXES,
    ),
    "no proxy fence before a box leaves": edited(
        "epilogue",
        "ptx.fence_proxy(ptx.Proxy.ASYNC_SHARED, space=ptx.SharedSpace.shared_cta)",
        "pass",
        "MissingProxyFence",
    ),
    "boxes not waited for at the end": edited(
        "epilogue", "ptx.cp_async_bulk_wait_group(0, read=True)", "pass", "UnfinishedStore"
    ),
    "rows of stmatrix swapped": edited("epilogue", "lane // 8 % 2", "(1 - lane // 8 % 2)", WRONG),
    "no swizzle of a box": edited("epilogue", "(piece ^ (row & 7)) * 8", "piece * 8", WRONG),
    # Results stored element by element.
    "not met before a tile's elements are spilled": edited(
        "epilogue",
        "            self._sync(group)\n            self._spill",
        "            self._spill",
        "DataRace",
        DEEP,
    ),
    "not met after elements are spilled": edited(
        "epilogue", "thread)\n            self._sync(group)", "thread)", "UninitialisedRead", DEEP
    ),
    "columns beyond the last one": edited(
        "epilogue",
        "if column < self._columns(result):",
        "if column < self._columns(result) + 8:",
        "OutOfBounds",
        FEW,
    ),
    "tokens beyond the last one": edited(
        "epilogue",
        "\n                    if at < result.m:",
        "\n                    if at < result.m + 1:",
        "OutOfBounds",
        FEW,
    ),
    "ends of shards ignored": edited(
        "scaling", "shard += Int32(row >= operands.ends[end])", "pass", WRONG, SHARDS
    ),
    "shards end one row later": edited(
        "scaling", "row >= operands", "row > operands", WRONG, SHARDS
    ),
    "bias ignored": edited(
        "scaling",
        "[value + bias for value, bias in zip(values, row.biases, strict=True)]",
        "values",
        WRONG,
        SHARDS,
    ),
    "gate and up swapped": edited(
        "scaling",
        "activated(values, self.output.activation or",
        "activated(values[::-1],",
        WRONG,
        PAIR,
    ),
    # Setup.
    "no fence of the barriers' initialisation": edited(
        "kernel", "ptx.fence_mbarrier_init()", "pass", "MissingProxyFence", SPLIT
    ),
    "CTA not met after the barriers' initialisation": edited(
        "kernel", "        ptx.barrier_cta_sync()\n", "", "BarrierMisuse"
    ),
}
