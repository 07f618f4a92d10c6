"""Mistakes made on purpose in the block-scaled GEMM, each reported or seen in the numbers."""

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from nvfp4_kernels import compile as kernel_compile
from nvfp4_kernels import gemm, silu_mul_gemm, silu_mul_gemm_quantized
from nvfp4_kernels.gemm.sm100.tile import Tile
from tests import devices
from tests.emulator import STANDARD, EmulatorError
from tests.emulator.findings import MissingDependencyWait
from tests.test_kernels import oracle
from tests.test_kernels.gemm.linear_cases import Case
from tests.test_kernels.gemm.test_tiles_sm100 import TileCase, pair_case, use
from tests.test_kernels.silu_mul_gemm import test_silu_mul_gemm

Patch = Callable[[pytest.MonkeyPatch], None]

# Both rings go round more than once, and results leave in boxes.
PAIR = TileCase(Tile(64, 2, max_stages=2), Case(200, 80, 1312, out_dtype=torch.bfloat16), 1)
SPLIT = TileCase(Tile(8, 2, swap_ab=True, split_k=2), Case(7, 272, 1056, row_scale=True), 2)
TWO_CTA = TileCase(Tile(128, 2, two_cta=True, cluster_m=2), Case(300, 208, 800), 2)


@dataclass(frozen=True)
class Mistake:
    """What is changed, on which tile, and what says so: a finding's class, or "wrong numbers"."""

    patch: Patch
    caught: str
    on: TileCase = PAIR


def without(name: str, when: Callable[..., bool] = lambda *a, **k: True) -> Patch:
    """Leaves out every use of a primitive for which ``when`` holds."""

    def apply(patch: pytest.MonkeyPatch) -> None:
        from cutlass.experimental import primitives as ptx

        given = getattr(ptx, name)

        def maybe(*args: Any, **kwargs: Any) -> Any:
            return None if when(*args, **kwargs) else given(*args, **kwargs)

        patch.setattr(ptx, name, maybe)

    return apply


def changed(name: str, change: Callable[..., tuple[Any, ...]]) -> Patch:
    """Changes the positional arguments of every use of a primitive."""

    def apply(patch: pytest.MonkeyPatch) -> None:
        from cutlass.experimental import primitives as ptx

        given = getattr(ptx, name)
        patch.setattr(ptx, name, lambda *args, **kwargs: given(*change(*args), **kwargs))

    return apply


def swap_weight_scales(patch: pytest.MonkeyPatch) -> None:
    from nvfp4_kernels.gemm.sm100.mma import Mma

    given = Mma._copy_scales

    def swapped(self: Any, descriptors: list[Any], *rest: Any) -> None:
        given(self, [descriptors[0], descriptors[2], descriptors[1]], *rest)

    patch.setattr(Mma, "_copy_scales", swapped)


def accumulate_always(patch: pytest.MonkeyPatch) -> None:
    from nvfp4_kernels.gemm.sm100.mma import Mma

    given = Mma._multiply
    patch.setattr(Mma, "_multiply", lambda self, *args: given(self, *args[:-1], True))


def one_alpha(patch: pytest.MonkeyPatch) -> None:
    from nvfp4_kernels.gemm.sm100.scaling import Scaling

    given = Scaling.apply

    def apply(self: Any, sums: Any, row: Any, *rest: Any) -> Any:
        return given(self, sums, type(row)([row.scales[0]] * 2, row.bias), *rest)

    patch.setattr(Scaling, "apply", apply)


def keep_another(patch: pytest.MonkeyPatch) -> None:
    from cutlass.experimental import primitives as ptx

    from nvfp4_kernels.gemm.sm100.mma import Mma

    last = ptx.Tcgen05MMACollectorOp.LASTUSE
    patch.setattr(Mma, "_collector", lambda self, product: last if product else None)


def two_readers(patch: pytest.MonkeyPatch) -> None:
    from nvfp4_kernels.gemm.sm100 import barriers

    given = barriers.arrive_counts
    patch.setattr(barriers, "arrive_counts", lambda tile: replace(given(tile), empty=2))


def attribute(owner: str, name: str, value: Any) -> Patch:
    def apply(patch: pytest.MonkeyPatch) -> None:
        from importlib import import_module

        module, _, kind = owner.rpartition(".")
        patch.setattr(
            getattr(import_module(f"nvfp4_kernels.gemm.sm100.{module}"), kind), name, value
        )

    return apply


MISTAKES = {
    "scales of gate and up swapped": Mistake(swap_weight_scales, "wrong numbers"),
    "accumulate left on": Mistake(accumulate_always, "UninitialisedRead"),
    "the gate's alpha for both": Mistake(one_alpha, "wrong numbers"),
    "activations used but not kept": Mistake(keep_another, "IllegalInstruction"),
    "no scales copied": Mistake(without("tcgen05_cp"), "UninitialisedRead"),
    "bytes expected twice": Mistake(
        changed("mbarrier_arrive_expect_tx", lambda barrier, n: (barrier, 2 * n)), "Deadlock"
    ),
    "too few bytes expected": Mistake(
        changed("mbarrier_arrive_expect_tx", lambda barrier, n: (barrier, n - 2048)), ""
    ),
    "arrive count of empty": Mistake(two_readers, "Deadlock"),
    "no wait for the stored box": Mistake(
        without("cp_async_bulk_wait_group", lambda n, read: n > 0), "DataRace"
    ),
    "no proxy fence before a box leaves": Mistake(without("fence_proxy"), "MissingProxyFence"),
    "no wait for tcgen05.ld": Mistake(without("tcgen05_wait"), "UnwaitedLoad"),
    "no tcgen05 fence": Mistake(without("tcgen05_fence"), "MissingTensorFence"),
    "no fence of the barriers' initialisation": Mistake(
        without("fence_mbarrier_init"), "MissingProxyFence", TWO_CTA
    ),
    "no warp barrier": Mistake(without("bar_warp_sync"), "DataRace"),
    "tensor memory kept": Mistake(without("tcgen05_dealloc"), "TensorMemory"),
    "parts of a split not announced": Mistake(
        without("mbarrier_arrive", lambda *a, **k: "scope" in k), "Deadlock", SPLIT
    ),
    "half of the weights for both CTAs": Mistake(
        attribute("loader.TmaLoader", "_n_row", lambda self, coord, state: coord.n * 128),
        "wrong numbers",
        TWO_CTA,
    ),
}


def outcome(tile_case: TileCase) -> str:
    """The first thing that is noticed, over all schedules."""
    for schedule in STANDARD:
        with devices.emulated_ops(schedule):
            try:
                test_silu_mul_gemm.check_exact(silu_mul_gemm, pair_case(tile_case.case))
            except EmulatorError as finding:
                return type(finding).__name__
            except AssertionError:
                return "wrong numbers"
    return "nothing"


@pytest.mark.parametrize("name", MISTAKES)
def test_caught(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    devices.cutlass_or_skip()
    mistake = MISTAKES[name]
    with devices.emulated_ops(STANDARD[0]):
        mistake.patch(monkeypatch)
    use(mistake.on, monkeypatch)
    kernel_compile.compiled.cache_clear()
    try:
        noticed = outcome(mistake.on)
    finally:
        kernel_compile.compiled.cache_clear()
    print(f"{name}: {noticed}")
    assert noticed != "nothing"
    assert noticed.startswith(mistake.caught)


@pytest.mark.parametrize("tile_case", [PAIR, SPLIT, TWO_CTA], ids=["pair", "split", "two SM"])
def test_nothing_to_catch(tile_case: TileCase, monkeypatch: pytest.MonkeyPatch) -> None:
    devices.cutlass_or_skip()
    use(tile_case, monkeypatch)
    assert outcome(tile_case) == "nothing"


def mlp() -> Tensor:
    """The second kernel reads what the first one writes, and may start before it has ended."""
    given = test_silu_mul_gemm.make_problem(pair_case(PAIR.case), grid=True).args
    args = {name: value for name, value in given.items() if name != "out_dtype"}
    data, scales = silu_mul_gemm_quantized(**args, out_global_scale=torch.tensor(1.0))
    down = oracle.grid_operand(np.random.default_rng(1), 64, 2 * data.shape[1])
    return gemm(data, scales, down.data, down.scales, torch.ones(1), [64])


def test_a_kernel_waits_for_the_one_before(monkeypatch: pytest.MonkeyPatch) -> None:
    devices.cutlass_or_skip()
    with devices.emulated_ops(STANDARD[0]):
        mlp()
        without("griddepcontrol", lambda action: str(action) == "wait")(monkeypatch)
        kernel_compile.compiled.cache_clear()
        with pytest.raises(MissingDependencyWait, match=r"griddepcontrol\.wait before the read"):
            mlp()
    kernel_compile.compiled.cache_clear()
