"""Every tile of the weight-only GEMM of sm_90, bit for bit, also with several tiles per CTA."""

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch import Tensor

from nvfp4_kernels.formats.fragments import Fragments, decode_fragments, to_fragments
from nvfp4_kernels.gemm.arguments import MAX_SHARDS
from nvfp4_kernels.gemm.sm90.choose import Problem, fits, with_store
from nvfp4_kernels.gemm.sm90.tile import EpilogueConfig, Tile
from nvfp4_kernels.runtime.compile import build, launch
from tests.devices import KernelDevice, emulated
from tests.emulator import EAGER
from tests.test_kernels.rounds import gemm_sm90

# The tests of mutants run every schedule; this one exposes every mutant that any schedule exposes.
pytestmark = [pytest.mark.arch("sm_90"), pytest.mark.schedules("random 1")]

# Tokens, weight rows, K: over several tiles, the last of them ragged.
SMALL, LARGE = (5, 200, 512), (150, 328, 256)
TILES = {
    "8": (Tile(8, k_tiles=2, max_stages=2), (5, 300, 512)),
    "8, K in 2": (Tile(8, split_k=2, k_tiles=2, max_stages=2), (5, 300, 512)),
    "8, one warpgroup, K in 8": (Tile(8, warpgroups=1, split_k=8), SMALL),
    "16, pair, K in 4": (Tile(16, 2, split_k=4, warpgroups=1, max_stages=2), (9, 136, 512)),
    "8, sliced": (Tile(8, warpgroups=2, slices=2, max_stages=3), SMALL),
    "8, two of three slices, K in 2": (Tile(8, warpgroups=6, slices=3, split_k=2), SMALL),
    "16, pair, sliced, K in 2": (
        Tile(16, 2, warpgroups=2, slices=2, split_k=2, max_stages=2),
        (9, 136, 320),
    ),
    "16, pair, sliced": (Tile(16, 2, warpgroups=2, slices=2, max_stages=4), (9, 136, 320)),
    "32, four warpgroups": (Tile(32, warpgroups=4, k_tiles=2), (20, 520, 256)),
    "32, sliced, K in 2": (
        Tile(32, warpgroups=2, slices=2, k_tiles=2, split_k=2, max_stages=2),
        (20, 200, 1024),
    ),
    "24, four slices": (Tile(24, warpgroups=4, slices=4, max_stages=4), (20, 136, 576)),
    "32, pair": (Tile(32, 2, warpgroups=1), (20, 136, 128)),
    "64": (Tile(64), LARGE),
    "64, two stages": (Tile(64, k_tiles=2, max_stages=2), LARGE),
    "64, pair": (Tile(64, 2), LARGE),
    "80": (Tile(80, max_stages=2), LARGE),
    "96": (Tile(96, k_tiles=2), LARGE),
    "128, K in 2": (Tile(128, split_k=2, max_stages=2), LARGE),
    "128, K in turn": (Tile(128, parts_in_turn=2, max_stages=2), LARGE),
    "112, pair": (Tile(112, 2), LARGE),
    "128, pair": (Tile(128, 2), LARGE),
    "128, pair apart, two K tiles": (
        Tile(128, 2, weight_per_warpgroup=True, k_tiles=2, max_stages=2),
        (150, 72, 768),
    ),
    "128, pair apart, K in turn": (
        Tile(128, 2, weight_per_warpgroup=True, parts_in_turn=2, max_stages=2),
        (150, 72, 384),
    ),
    "160": (Tile(160), (170, 200, 128)),
    "160, K in 2": (Tile(160, split_k=2), (170, 200, 256)),
    "176": (Tile(176), (170, 72, 128)),
    "192": (Tile(192), (250, 264, 128)),
    "256": (Tile(256), (300, 264, 128)),
    "224, pair apart": (Tile(224, 2, weight_per_warpgroup=True), (230, 40, 128)),
    "256, pair apart": (Tile(256, 2, weight_per_warpgroup=True), (300, 40, 256)),
}


def weight(n: int, k: int) -> Fragments:
    """Weight of all code values, with scales of 2 and 1/2."""
    data = torch.randint(0, 256, (n, k // 2), dtype=torch.uint8)
    scales = torch.tensor([0.5, 2.0])[torch.randint(0, 2, (n, k // 16))]
    return to_fragments(data, scales.to(torch.float8_e4m3fn))


def run(
    device: KernelDevice,
    tile: Tile,
    output: EpilogueConfig,
    x: Tensor,
    weights: list[Fragments],
    n: int,
    sms: int,
    alpha: Tensor | None = None,
    bias: Tensor | None = None,
    ends: Sequence[int] = (),
) -> Tensor:
    """Product of ``x`` with weights of ``n`` rows; alphas default to 1."""
    from nvfp4_kernels.gemm.sm90.kernel import GemmArguments, WeightOnlyGemm

    m, k = x.shape
    put = [device.put(f"weight {i}", t) for i, w in enumerate(weights) for t in w]
    alpha = device.put("alpha", torch.ones(len(weights)) if alpha is None else alpha)
    bias = None if bias is None else device.put("bias", bias)
    rest = [0] * (MAX_SHARDS - 1 - len(ends))
    out = device.output("out", torch.empty(m, n, dtype=getattr(torch, output.dtype)))
    arguments = GemmArguments(
        device.put("x", x), *put[:2], *put[-2:], out, alpha, bias, m, n, k, sms, (*ends, *rest)
    )
    launch(WeightOnlyGemm(tile, output), arguments)
    return out.cpu()


CASES = {
    f"{name}, {'boxes' if boxes else 'elements'}": (tile, size, boxes)
    for name, (tile, size) in TILES.items()
    for boxes in (True, False)
    if not boxes or with_store(EpilogueConfig(), tile, size[1]).boxes
}


def family(tile: Tile) -> str:
    """Name of the tile's family; kernels of different families hand data over differently."""
    words = ["mma.sync" if tile.uses_mma_sync else "wgmma"] + ["sliced"] * (tile.slices > 1)
    words += ["gate and up"] * (tile.weights == 2) + ["apart"] * tile.weight_per_warpgroup
    return ", ".join(words + ["split"] * (tile.split_k > 1))


@pytest.mark.parametrize("kind", sorted({family(tile) for tile, _ in TILES.values()}))
def test_each_family_goes_round(kind: str) -> None:
    """Some case of each family wraps around its ring and its accumulators on one SM."""
    rounds = {
        name: gemm_sm90(
            tile, replace(with_store(EpilogueConfig(), tile, n), boxes=boxes), m, n, k, 1
        )
        for name, (tile, (m, n, k), boxes) in CASES.items()
        if family(tile) == kind
    }
    assert any(each.enough for each in rounds.values()), rounds


@pytest.mark.parametrize("sms", [1, 132], ids=["one SM", "a tile each"])
@pytest.mark.parametrize(("tile", "size", "boxes"), CASES.values(), ids=CASES)
def test_tile(
    tile: Tile, size: tuple[int, int, int], boxes: bool, sms: int, device: KernelDevice
) -> None:
    m, n, k = size
    output = replace(with_store(EpilogueConfig(), tile, n), boxes=boxes)
    assert fits(Problem(m, n, k, tile.weights), tile, output)
    x = torch.randint(-2, 3, (m, k)).bfloat16()
    weights = [weight(n, k) for _ in range(tile.weights)]
    out = run(device, tile, output, x, weights, n, sms)
    products = [x.float() @ decode_fragments(*w, n, k).T for w in weights]
    if len(products) == 1:
        assert torch.equal(out, products[0].bfloat16())
    else:
        right = torch.nn.functional.silu(products[0].double()) * products[1].double()
        assert ((out.double() - right).abs() <= 2.0**-7 * right.abs() + 1e-4).all()


# Tiles among which batch invariance chooses: K split in two.
IN_TWO = {
    1: (
        Tile(8, warpgroups=1, split_k=2, k_tiles=2),
        Tile(16, warpgroups=1, split_k=2),
        Tile(32, warpgroups=1, split_k=2, k_tiles=2),
        Tile(64, split_k=2),
        Tile(48, parts_in_turn=2, k_tiles=2),
        Tile(128, parts_in_turn=2),
    ),
    2: (
        Tile(8, 2, warpgroups=1, split_k=2, k_tiles=4),
        Tile(32, 2, warpgroups=1, split_k=2),
        Tile(64, 2, parts_in_turn=2),
        Tile(96, 2, parts_in_turn=2, weight_per_warpgroup=True),
    ),
}


@pytest.mark.schedules("random 1")
@pytest.mark.parametrize("weights", IN_TWO)
def test_parts_of_k_decide_the_bits(weights: int, device: KernelDevice) -> None:
    """Split-K gives the same bits for any number of tokens per tile; K whole gives other bits."""
    m, n, k = 40, 72, 1024
    x = torch.randn(m, k).bfloat16()
    given = [weight(n, k) for _ in range(weights)]

    def bits(tile: Tile) -> Tensor:
        return run(device, tile, EpilogueConfig(dtype="float32"), x, given, n, 132)

    first, *others = map(bits, IN_TWO[weights])
    for tile, found in zip(IN_TWO[weights][1:], others, strict=True):
        assert torch.equal(found, first), tile
    assert not torch.equal(bits(Tile(64, weights)), first)


@pytest.mark.schedules("random 1")
def test_a_pair_apart_gives_the_same_bits(device: KernelDevice) -> None:
    n, k = 72, 128
    x = torch.randint(-2, 3, (110, k)).half()
    weights, alpha = [weight(n, k), weight(n, k)], torch.tensor([2.0**-6, 0.5])
    weight_per_warpgroup = Tile(96, 2, weight_per_warpgroup=True)
    together, boxes, elements = (
        run(
            device, tile, EpilogueConfig("float16", "float16", boxes=boxes), x, weights, n, 1, alpha
        )
        for tile, boxes in (
            (Tile(64, 2), False),
            (weight_per_warpgroup, True),
            (weight_per_warpgroup, False),
        )
    )
    assert torch.equal(boxes, together)
    assert torch.equal(elements, together)


@pytest.mark.parametrize(("tile", "forgets"), [(Tile(32), True), (Tile(64), False)])
def test_weights_of_one_tile_of_tokens_leave_l2_first(
    tile: Tile, forgets: bool, tmp_path: Path
) -> None:
    with emulated(EAGER, "sm_90"):  # keeps the PTX beside the binary
        from nvfp4_kernels.gemm.sm90.kernel import WeightOnlyGemm

        build(WeightOnlyGemm(tile, EpilogueConfig()), tmp_path / "kernel.o")
    code = (tmp_path / "kernel.o").read_bytes()
    copies = [line for line in code.split(b";") if b"cp.async.bulk.shared" in line]
    assert copies
    assert all((b"L2::cache_hint" in line) == forgets for line in copies)
