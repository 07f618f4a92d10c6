"""Hardware questions: tasks in which a GPU may behave unlike the tests' emulator."""

from dataclasses import replace
from itertools import product

from nvfp4_kernels.gemm.sm100.tile import Tile
from nvfp4_kernels.tool.forced_product_case import ForcedProductCase
from nvfp4_kernels.tool.forced_scores_case import ForcedScoresCase
from nvfp4_kernels.tool.single_dimension_case import SingleDimensionCase
from nvfp4_kernels.tool.task import Task
from nvfp4_kernels.tool.tensor_map_case import SmallMapsCase

LAUNCHES = 4000
SETS = {1: "one scale set", 2: "two scale sets"}
DEPTHS = (3, 5)
LENGTHS = (3000, 1, 700)  # keys: rings go round several times
STAGGERED = "staggered cluster starts"
ODD_COLUMNS = "scales at odd columns"


def doubts() -> list[Task]:
    """Tasks on scale sets and offsets, staggered clusters, tensor maps, strides, ring depths."""
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
