"""Hardware questions: tasks in which a GPU may behave unlike the tests' emulator."""

from dataclasses import replace
from itertools import product

from nvfp4_kernels.gemm.sm100.tile import Tile
from nvfp4_kernels.tool.attention_case import AttentionCase
from nvfp4_kernels.tool.forced_product_case import ForcedProductCase
from nvfp4_kernels.tool.forced_scores_case import ForcedScoresCase
from nvfp4_kernels.tool.fused_attention_case import FusedAttentionCase
from nvfp4_kernels.tool.single_dimension_case import SingleDimensionCase
from nvfp4_kernels.tool.task import Task
from nvfp4_kernels.tool.tensor_map_case import SmallMapsCase

LAUNCHES = 4000
SETS = {1: "one scale set", 2: "two scale sets"}
DEPTHS = (3, 5)
LENGTHS = (3000, 1, 700)  # keys: rings go round several times
STAGGERED = "staggered cluster starts"
ODD_COLUMNS = "scales at odd columns"
COLLECTED = {True: "terms from the collector buffer", False: "terms without the collector buffer"}
SPLIT = "partial sums by st.async"
STORED = ((1, 3000), (1, 700), (1, 17))  # queries and keys of each sequence


def doubts() -> list[Task]:
    """Tasks on tensor memory's scales, collector buffers, clusters, tensor maps, strides, rings."""
    tasks: list[Task] = []
    pair, four = (Tile(128, two_cta=True, cluster_m=ctas) for ctas in (2, 4))
    for sets, words in SETS.items():
        for tile, m in ((Tile(128), 300), (pair, 300), (Tile(8, swap_ab=True), 8)):
            chosen = (replace(tile, scale_sets=sets),)
            tasks.append(ForcedProductCase(words, chosen, m, 264, 8192))
        tasks.append(ForcedScoresCase("nvfp4", LENGTHS, what=words, scale_sets=sets))
    tasks += [
        ForcedProductCase(ODD_COLUMNS, (tile,), 300, 424, 8192)
        for tile in (Tile(96), Tile(96, two_cta=True, cluster_m=2))
    ]
    tasks.append(ForcedProductCase(ODD_COLUMNS, (Tile(32, swap_ab=True),), 96, 424, 8192))
    # The scales of all terms of at most 32 tokens share an atom: a column each, odd for the second.
    for terms, tokens, collects in product((2, 3), (8, 16, 32), COLLECTED):
        tile = Tile(tokens, swap_ab=True, collects=collects)
        words = COLLECTED[collects]
        tasks.append(ForcedProductCase(words, (tile,), tokens, 264, 4096, terms=terms))
    tasks += [
        ForcedProductCase(
            SPLIT, (Tile(tokens, swap_ab=True, split_k=parts),), tokens, 264, 8192, LAUNCHES
        )
        for tokens, parts in ((8, 2), (8, 8), (32, 4))
    ]
    tasks += [
        FusedAttentionCase(
            AttentionCase(STORED, 8, 2, fp8=fp8), fp8, rotated=True, launches=LAUNCHES
        )
        for fp8 in (False, True)
    ]
    # Single CTAs in between end separately, and free one SM of a pair before the other.
    single = Tile(128)
    tasks += [
        ForcedProductCase(STAGGERED, tiles, 600, 520, 256, LAUNCHES)
        for tiles in ((pair,), (pair, single), (four, single), (pair, single, four))
    ]
    tasks.append(SmallMapsCase())
    tasks += [SingleDimensionCase(op) for op in ("attention", "sparse attention", "indexer")]
    tasks += [
        ForcedScoresCase(fmt, LENGTHS, what=f"ring of {depth}", max_stages=depth)
        for depth, fmt in product(DEPTHS, ("nvfp4", "fp8"))
    ]
    return tasks
