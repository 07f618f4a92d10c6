"""Every kind of tile of the FP8 GEMM of sm_90, bit for bit, also with several tiles per CTA."""

from dataclasses import replace

import pytest
import torch
from torch import Tensor

from nvfp4_kernels.formats.folded import FoldedWeight, decode_folded
from nvfp4_kernels.formats.fp8_rows import from_rows, padded, to_rows
from nvfp4_kernels.gemm.arguments import MAX_SHARDS
from nvfp4_kernels.gemm.sm90.choose import Problem, with_store
from nvfp4_kernels.gemm.sm90.choose_fp8 import fits
from nvfp4_kernels.gemm.sm90.tile import EpilogueConfig, Tile
from nvfp4_kernels.runtime.compile import launch
from tests.devices import Emulated, KernelDevice
from tests.test_kernels.gemm.test_fp8_sm90 import factors, rows, truncation, weight

# The tests of mutants run every schedule; this one exposes every mutant that any schedule exposes.
pytestmark = [pytest.mark.arch("sm_90"), pytest.mark.schedules("random 1")]

OUTPUT = EpilogueConfig(act="float8_e4m3fn")
E4M3 = replace(OUTPUT, dtype="float8_e4m3fn")
OUT_SCALE = 2.0**-3
# Tokens, weight rows, K: over several tiles, the last of them ragged; K may end in half a K tile.
SMALL, LARGE = (5, 200, 1024), (150, 328, 448)
TILES = {
    "8": (Tile(8, max_stages=2), (5, 300, 832)),
    "8, K in 2": (Tile(8, split_k=2, k_tiles=2, max_stages=2), SMALL),
    "8, one warpgroup, K in 8": (Tile(8, warpgroups=1, split_k=8), SMALL),
    "8, two slices": (Tile(8, warpgroups=2, slices=2, max_stages=4), SMALL),
    "16, four slices, K in 2": (Tile(16, warpgroups=4, slices=4, split_k=2), (9, 136, 1280)),
    "16, pair, two slices, K in 2": (
        Tile(16, 2, warpgroups=2, slices=2, split_k=2, max_stages=4),
        (9, 136, 1152),
    ),
    "32, pair": (Tile(32, 2, warpgroups=1, k_tiles=2, max_stages=2), (20, 136, 512)),
    "64": (Tile(64, max_stages=2), LARGE),
    "64, one warpgroup, K in 2": (Tile(64, warpgroups=1, split_k=2), (70, 136, 512)),
    "64, pair": (Tile(64, 2, max_stages=2), LARGE),
    "96, two K tiles": (Tile(96, k_tiles=2, max_stages=2), (150, 200, 768)),
    "128, pair": (Tile(128, 2), LARGE),
    "128, pair apart": (Tile(128, 2, weight_per_warpgroup=True, max_stages=2), LARGE),
    "160": (Tile(160), LARGE),
    "256": (Tile(256, max_stages=2), (300, 200, 320)),
    "256, pair apart": (Tile(256, 2, weight_per_warpgroup=True), (300, 72, 192)),
}
CASES = {
    f"{name}, {dtype}{', boxes' if boxes else ''}": (tile, size, out, boxes)
    for name, (tile, size) in TILES.items()
    for dtype, out in {"bf16": OUTPUT, "E4M3": E4M3}.items()
    for boxes in (True, False)
    if not boxes or with_store(out, tile, size[1]).boxes
}


def run(
    device: KernelDevice,
    tile: Tile,
    output: EpilogueConfig,
    x: Tensor,
    weights: list[FoldedWeight],
    n: int,
    sms: int,
) -> Tensor:
    """Product of E4M3 rows ``x`` with weights of ``n`` rows, or SiLU-mul of two products."""
    from nvfp4_kernels.gemm.sm90.kernel import GemmArguments, WeightOnlyGemm

    m, k = x.shape
    put = [device.put(f"weight {i}", t) for i, w in enumerate(weights) for t in w[:2]]
    alpha = device.put("alpha", torch.stack([factors(w) for w in weights]))
    columns = padded(n) if output.is_fp8 else n
    out = device.output("out", torch.empty(m, columns, dtype=getattr(torch, output.dtype)))
    sizes = m, n, k, sms, (0,) * (MAX_SHARDS - 1)
    scale = device.put("out_scale", torch.tensor(OUT_SCALE))
    arguments = GemmArguments(
        device.put("x", x), *put[:2], *put[-2:], out, alpha, None, *sizes, out_scale=scale
    )
    launch(WeightOnlyGemm(replace(tile, fp8=True), output), arguments)
    return out.cpu()


def check(
    device: KernelDevice, tile: Tile, output: EpilogueConfig, size: tuple[int, int, int], sms: int
) -> None:
    """Check a product on grid values against the formula."""
    m, n, k = size
    weights = [weight(n, k, seed) for seed in range(tile.weights)]
    x = rows(m, k)
    out = run(device, tile, output, x, weights, n, sms)
    values = from_rows(x, k).double()
    products = [
        values @ decode_folded(w.data, w.scales, n, x.shape[1])[:, :k].double().T * factors(w)
        for w in weights
    ]
    if tile.weights == 2:
        exact = torch.nn.functional.silu(products[0]) * products[1]
    else:
        exact = products[0]
    assert exact.abs().max() > 1
    if not isinstance(device, Emulated):  # sums of a GPU are truncated
        values = out.double()
        if output.is_fp8:
            values, exact = from_rows(out, n).double() * OUT_SCALE, exact.clamp(-56, 56)
        share = 2.0**-3 if output.is_fp8 or tile.weights == 2 else 2.0**-7
        margin = share * exact.abs() + 8 * truncation(k, float(exact.abs().max()))
        assert ((values - exact).abs() <= margin).all()
        return
    if not output.is_fp8:
        # Rounding of the result, and the errors of exp2 and rcp for the smallest values.
        margin = 2.0**-7 * exact.abs() + 1e-4 if tile.weights == 2 else 0
        assert ((out.double() - exact.bfloat16().double()).abs() <= margin).all()
        return
    expected = to_rows((exact / OUT_SCALE).clamp(-448, 448).float().to(torch.float8_e4m3fn))
    steps = (out.view(torch.uint8).int() - expected.view(torch.uint8).int()).abs()
    assert steps.max() <= (tile.weights == 2)
    assert steps.float().mean() <= 0.01


@pytest.mark.parametrize("sms", [1, 132], ids=["one SM", "a tile each"])
@pytest.mark.parametrize(("tile", "size", "output", "boxes"), CASES.values(), ids=CASES)
def test_tile(
    tile: Tile,
    size: tuple[int, int, int],
    output: EpilogueConfig,
    boxes: bool,
    sms: int,
    device: KernelDevice,
) -> None:
    chosen = replace(with_store(output, tile, size[1]), boxes=boxes)
    assert fits(Problem(*size, tile.weights), replace(tile, fp8=True), chosen)
    check(device, tile, chosen, size, sms)
