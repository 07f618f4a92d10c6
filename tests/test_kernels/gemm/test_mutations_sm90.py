"""Mutation tests of the GEMM of sm_90: each mutant is reported, or its results are wrong."""

from pathlib import Path

import pytest
import torch

from nvfp4_kernels.formats.fragments import decode_fragments
from nvfp4_kernels.gemm.sm90.tile import EpilogueConfig, Tile
from nvfp4_kernels.sm90.limits import ActDtype
from tests import devices
from tests.devices import KernelDevice
from tests.emulator import STANDARD
from tests.emulator.findings import MissingDependencyWait
from tests.test_kernels.changed_source import changed_source
from tests.test_kernels.gemm.mutants_sm90 import MISTAKES, PRODUCTS, Product
from tests.test_kernels.gemm.test_tiles_sm90 import run, weight
from tests.test_kernels.mistakes import NOTHING, loaded_ptx, noticed

PACKAGE = "nvfp4_kernels.gemm.sm90"


def check(device: KernelDevice, given: Product) -> None:
    """Check the kernel's results against the formula."""
    m, n, k, tile = given.m, given.n, given.k, given.tile
    torch.manual_seed(0)
    dtype: dict[ActDtype, torch.dtype] = {"bfloat16": torch.bfloat16, "float16": torch.float16}
    x = torch.randint(-2, 3, (m, k)).to(dtype[given.output.act])
    weights = [weight(n, k) for _ in range(tile.weights)]
    alpha = 2.0 ** torch.arange(max(given.output.shards, tile.weights))
    bias = torch.randint(-64, 65, (n,)).bfloat16() if given.output.bias else None
    out = run(
        device, tile, given.output, x, weights, n, given.sms, alpha, bias, given.ends
    ).double()
    products = [x.double() @ decode_fragments(*w, n, k).double().T for w in weights]
    if tile.weights == 2:
        # Rounding of the result, and the errors of exp2 and rcp for the smallest values.
        exact = torch.nn.functional.silu(products[0]) * products[1] * alpha[1]
        assert ((out - exact).abs() <= 2.0**-7 * exact.abs() + 1e-4).all()
        return
    shard = torch.bucketize(torch.arange(n), torch.tensor(given.ends, dtype=torch.long), right=True)
    exact = products[0] * alpha[shard] + (0 if bias is None else bias.double())
    assert torch.equal(out, exact.bfloat16().double())


def outcome(given: Product) -> str:
    """Return the first finding over all schedules."""
    for schedule in STANDARD:
        with devices.emulated(schedule, "sm_90") as device:
            found = noticed(lambda: check(device, given))
            if found != NOTHING:
                return found
    return NOTHING


@pytest.mark.parametrize("name", MISTAKES)
def test_caught(name: str, tmp_path: Path) -> None:
    devices.cutlass_or_skip()
    mistake = MISTAKES[name]
    with changed_source(PACKAGE, tmp_path / "sm90", mistake.module, mistake.right, mistake.wrong):
        assert outcome(mistake.on) == mistake.caught


@pytest.mark.parametrize("given", PRODUCTS.values(), ids=PRODUCTS)
def test_nothing_to_catch(given: Product, tmp_path: Path) -> None:
    devices.cutlass_or_skip()
    with changed_source(PACKAGE, tmp_path / "sm90"):
        assert outcome(given) == NOTHING


def two_products() -> None:
    """Launch two dependent products; the second reads the first one's result."""
    tile = Tile(8, max_stages=2)
    with devices.emulated(STANDARD[0], "sm_90") as device:
        x = torch.ones(5, 128, dtype=torch.bfloat16)
        between = run(device, tile, EpilogueConfig(), x, [weight(128, 128)], 128, 1)
        run(device, tile, EpilogueConfig(), between, [weight(64, 128)], 64, 1)


def test_a_kernel_waits_for_the_one_before(tmp_path: Path) -> None:
    devices.cutlass_or_skip()
    with changed_source(PACKAGE, tmp_path / "right"):
        two_products()
    wait = "ptx.griddepcontrol(ptx.GridDepAction.WAIT)"
    with (
        changed_source(PACKAGE, tmp_path / "wrong", "loader", wait, "pass"),
        pytest.raises(MissingDependencyWait, match=r"griddepcontrol\.wait before the read"),
    ):
        two_products()


def waits_before_it_lets_the_next_start() -> bool:
    """Whether each kernel of ``two_products`` waits before releasing its dependents."""
    return all(
        0 <= ptx.rfind("griddepcontrol.wait") < ptx.index("griddepcontrol.launch_dependents")
        for ptx in loaded_ptx(two_products)
    )


def test_the_next_kernel_starts_after_the_wait(tmp_path: Path) -> None:
    """Dependents may use earlier launches' results without a wait of their own.

    So a kernel must wait before it releases dependents; wrong results would not show the fault.
    """
    devices.cutlass_or_skip()
    with changed_source(PACKAGE, tmp_path / "right"):
        assert waits_before_it_lets_the_next_start()
    wait = "ptx.griddepcontrol(ptx.GridDepAction.WAIT)"
    early = f"{wait.replace('WAIT', 'LAUNCH_DEPENDENTS')}\n        {wait}"
    with changed_source(PACKAGE, tmp_path / "wrong", "loader", wait, early):
        assert not waits_before_it_lets_the_next_start()
