"""``grouped_gemm`` on sm_90: 16-bit tokens in tiles, weights of all experts in fragments."""

from dataclasses import replace

import numpy as np
import pytest
import torch

from nvfp4_kernels import InvalidArgument, grouped_gemm
from nvfp4_kernels.activation import UNGATED, Activation
from nvfp4_kernels.gemm.sm90.tile import EpilogueConfig, Tile
from tests.devices import Emulated, KernelDevice
from tests.test_kernels.gemm.grouped import chain_sm90
from tests.test_kernels.gemm.grouped.cases_sm90 import CASES, on_device, problem_of
from tests.test_kernels.gemm.grouped.grouped_cases import GroupedCase
from tests.test_kernels.gemm.grouped.tiles_sm90 import grid_operands, launched
from tests.test_kernels.routing_cases import RoutingCase

pytestmark = [pytest.mark.arch("sm_90"), pytest.mark.schedules("random 1")]


@pytest.mark.parametrize("case", CASES.values(), ids=CASES)
def test_grid_values_are_exact(case: GroupedCase, op_device: torch.device) -> None:
    problem = problem_of(case, gated=False)
    out = grouped_gemm(**on_device(problem.args, op_device)).cpu()
    assert out.dtype == case.out_dtype
    assert out.shape == (*problem.a.shape[:2], case.n)
    for tile in range(problem.used):
        expected = torch.from_numpy(problem.products(tile)).float().to(case.out_dtype)
        assert torch.equal(out[tile], expected)


@pytest.mark.parametrize("name", UNGATED)
def test_activations(name: str, op_device: torch.device) -> None:
    problem = problem_of(CASES["float32 out"], gated=False)
    args = {**problem.args, "activation": Activation(name)}
    out = grouped_gemm(**on_device(args, op_device)).cpu()
    for tile in range(problem.used):
        expected = Activation(name).ungated(torch.from_numpy(problem.products(tile)))
        if name == "relu2":
            assert torch.equal(out[tile], expected.float())
        # Near zero, 1 + erf cancels to within 2^-23.
        torch.testing.assert_close(out[tile].double(), expected, rtol=1e-5, atol=2e-6)


@pytest.mark.parametrize("name", UNGATED)
def test_nan_stays_in_its_row(name: str, op_device: torch.device) -> None:
    problem = problem_of(CASES["one token"], gated=False)
    problem.args["a"][0, 3, 5] = torch.nan
    args = {**problem.args, "activation": Activation(name)}
    out = grouped_gemm(**on_device(args, op_device)).cpu()
    assert out[0, 3].isnan().all()
    assert not out[0, :3].isnan().any()
    assert not out[0, 4:].isnan().any()


@pytest.mark.parametrize("name", ["a", "alpha", "groups"])
def test_what_is_not_aligned_is_refused(name: str, op_device: torch.device) -> None:
    args = on_device(problem_of(CASES["one token"], gated=False).args, op_device)
    given = args[name]
    shifted = torch.empty(given.numel() + 1, dtype=given.dtype, device=op_device)[1:]
    shifted = shifted.view(given.shape).copy_(given)
    with pytest.raises(InvalidArgument, match=f"{name}: starts .* after a multiple of 16"):
        grouped_gemm(**{**args, name: shifted})


@pytest.mark.schedules("eager", "copies late", "tensor late", "all late", "random 1", "random 2")
def test_a_layer(device: KernelDevice) -> None:
    """Routing and both products, each starting before its predecessor has ended."""
    chain_sm90.layer(device)


def test_weights_beyond_two_gigabytes(device: KernelDevice) -> None:
    """Offsets of experts are 64 bits wide."""
    if not isinstance(device, Emulated):
        pytest.skip("needs the emulator, which is told of the last expert's weights alone")
    given = grid_operands(RoutingCase(5, 1, 1), 64, 64, gated=False)
    before = 2**31 // given.weights.data.nbytes + 1
    stacks = []
    for one in given.weights:
        # Pages that are never touched take no memory.
        stack = torch.from_numpy(np.zeros((before + 1, *one.shape[1:]), np.uint8))
        stack[before] = one[0]
        device.gpu.memory.register(stack[before].data_ptr(), one.nbytes, name="b", keep=stack)
        stacks.append(stack)
    assert stacks[0].nbytes > 2**31
    a = device.put("a", given.a)
    groups = device.put("groups", torch.tensor([1, before], dtype=torch.int32))
    last = replace(given, alpha=given.alpha.expand(before + 1).contiguous())
    tile = Tile(8, warpgroups=1, grouped=True)
    out = launched(device, tile, EpilogueConfig(), (a, groups, *stacks), last, 1)
    assert torch.equal(out, given.expected())
