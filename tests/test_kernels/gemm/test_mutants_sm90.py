"""Mutants of the GEMM of sm_90: each mutant is reported, or its results are wrong."""

from functools import partial

import pytest
import torch

from nvfp4_kernels.formats.fragments import decode_fragments
from nvfp4_kernels.gemm.sm90.tile import EpilogueConfig, Tile
from nvfp4_kernels.sm90.limits import ActDtype
from tests import devices
from tests.devices import KernelDevice
from tests.emulator import EAGER
from tests.mutants.kernels import (
    check_caught,
    check_dependency_wait,
    check_nothing_to_catch,
    compiled_anew,
    loaded_ptx,
)
from tests.test_kernels.gemm.mutants_sm90 import KERNEL, MUTANTS, PRODUCTS, Product
from tests.test_kernels.gemm.test_tiles_sm90 import run, weight

SM90 = {"arch": "sm_90", "takes_device": True}
WAIT = "ptx.griddepcontrol(ptx.GridDepAction.WAIT)"


def check(given: Product, device: KernelDevice) -> None:
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


@pytest.mark.parametrize("name", MUTANTS)
def test_caught(name: str) -> None:
    check_caught(MUTANTS[name], partial(check, MUTANTS[name].on), **SM90)


@pytest.mark.parametrize("given", PRODUCTS.values(), ids=PRODUCTS)
def test_nothing_to_catch(given: Product) -> None:
    check_nothing_to_catch(partial(check, given), KERNEL.edited(), **SM90)


def two_products(device: KernelDevice) -> None:
    """Launch two dependent products; the second reads the first one's result."""
    tile = Tile(8, max_stages=2)
    x = torch.ones(5, 128, dtype=torch.bfloat16)
    between = run(device, tile, EpilogueConfig(), x, [weight(128, 128)], 128, 1)
    run(device, tile, EpilogueConfig(), between, [weight(64, 128)], 64, 1)


def test_a_kernel_waits_for_the_one_before() -> None:
    wait = KERNEL.edited("loader", WAIT, "pass")
    check_dependency_wait(two_products, without_wait=wait, **SM90)


def waits_before_it_lets_the_next_start() -> bool:
    """Whether each kernel of ``two_products`` waits before releasing its dependents."""
    with devices.emulated(EAGER, "sm_90") as device:
        return all(
            0 <= ptx.rfind("griddepcontrol.wait") < ptx.index("griddepcontrol.launch_dependents")
            for ptx in loaded_ptx(partial(two_products, device))
        )


def test_the_next_kernel_starts_after_the_wait() -> None:
    """Dependents may use earlier launches' results without a wait of their own.

    So a kernel must wait before it releases dependents; wrong results would not show the fault.
    """
    with compiled_anew():
        assert waits_before_it_lets_the_next_start()
    early = f"{WAIT.replace('WAIT', 'LAUNCH_DEPENDENTS')}\n        {WAIT}"
    with compiled_anew(KERNEL.edited("loader", WAIT, early)):
        assert not waits_before_it_lets_the_next_start()
