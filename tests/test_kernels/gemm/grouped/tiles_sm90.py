"""Grouped products on sm_90: a given tile, launched on memory with poisoned spare tiles."""

from dataclasses import dataclass, replace

import torch
from torch import Tensor

from nvfp4_kernels.activation import SILU, Activation
from nvfp4_kernels.formats.fragments import Fragments
from nvfp4_kernels.gemm.call import GroupedGemmCall
from nvfp4_kernels.gemm.grouped.reference import grouped_gemm
from nvfp4_kernels.gemm.sm90.choose import with_store
from nvfp4_kernels.gemm.sm90.tile import EpilogueConfig, Tile
from nvfp4_kernels.runtime.compile import launch
from tests.devices import Emulated, KernelDevice
from tests.emulator.memory.clocks import HOST
from tests.emulator.memory.spaces import GRANULE
from tests.test_kernels.gemm.grouped.grouped_cases import (
    GroupedCase,
    grouped_problem,
    stacked_fragments,
)
from tests.test_kernels.routing_cases import RoutingCase

BF16 = torch.bfloat16
SIGNS = 0x88  # two E2M1 codes


@dataclass(frozen=True)
class Operands:
    """Arguments of a grouped product of 16-bit tokens, with weights in fragments.

    Attributes:
        a: ``(tiles, T, K)``.
        groups: ``(1 + tiles,)``.
        weights: ``(experts, [2])`` matrices of ``n`` rows.
        alpha: ``(experts, [2])``.
        activation: applied to the result.
    """

    a: Tensor
    groups: Tensor
    weights: Fragments
    alpha: Tensor
    n: int
    activation: Activation | None = None

    @property
    def used(self) -> int:
        """Number of tiles in use."""
        return int(self.groups[0])

    def expected(self, out_dtype: torch.dtype = BF16) -> Tensor:
        """Result of the tiles in use, by the reference."""
        operands = self.a, None, self.groups, *self.weights, self.alpha, None, None, self.n
        out, _ = grouped_gemm(GroupedGemmCall(*operands, self.activation, out_dtype))
        return out[: self.used]


def grid_operands(
    routing: RoutingCase, n: int, k: int, *, gated: bool, dtype: torch.dtype = BF16
) -> Operands:
    """Operands with exact float32 products; gates are so large that SiLU is the identity."""
    case = GroupedCase(routing, n, k, dtype)
    problem = grouped_problem(case, gated=gated)
    a, b, alpha = (problem.args[name] for name in ("a", "b", "alpha"))
    if gated:
        a, alpha[:, 0] = a.abs() + 1, alpha[:, 0] * 2**11
        b[:, 0] &= 0xFF ^ SIGNS
    weights = Fragments(*stacked_fragments(b, problem.args["b_scales"]))
    return Operands(a, problem.routing.groups, weights, alpha, n, SILU if gated else None)


def put_tiles(device: KernelDevice, name: str, tensor: Tensor, used: int) -> Tensor:
    """Put ``tensor`` on the device; rows from ``used`` on are poison and must not be read."""
    placed = device.output(name, tensor)
    placed[:used] = tensor[:used]
    if isinstance(device, Emulated) and used:
        memory = device.gpu.memory.at(placed.data_ptr())
        memory.shadow.writer[: placed[:used].nbytes // GRANULE] = HOST
    return placed


def run(
    device: KernelDevice, tile: Tile, output: EpilogueConfig, given: Operands, sms: int
) -> Tensor:
    """Launch one kernel; return all rows, including spare tiles."""
    weights = [device.put("b", given.weights.data), device.put("b_scales", given.weights.scales)]
    used = given.used
    a = put_tiles(device, "a", given.a, used)
    groups = put_tiles(device, "groups", given.groups, 1 + used)
    return launched(device, tile, output, (a, groups, *weights), given, sms)


def launched(
    device: KernelDevice,
    tile: Tile,
    output: EpilogueConfig,
    placed: tuple[Tensor, ...],
    given: Operands,
    sms: int,
    name: str = "out",
) -> Tensor:
    """Launch one kernel on operands on the device: tokens, groups, a weight's data and scales."""
    from nvfp4_kernels.gemm.sm90.kernel import GemmArguments, WeightOnlyGemm

    a, groups, data, scales = placed
    tiles, tokens, k = a.shape
    out = torch.empty(tiles, tokens, given.n, dtype=getattr(torch, output.dtype))
    out = device.output(name, out)
    alpha = device.put(f"alpha of {name}", given.alpha)
    arguments = GemmArguments(
        x=a,
        w1=data,
        sfw1=scales,
        w2=None,
        sfw2=None,
        out=out,
        alpha=alpha,
        bias=None,
        m=tiles * tokens,
        n=given.n,
        k=k,
        sms=sms,
        shard_ends=(0,) * 7,
        groups=groups,
    )
    launch(WeightOnlyGemm(tile, replace(output, activation=given.activation)), arguments)
    return out


def check(
    device: KernelDevice, tile: Tile, output: EpilogueConfig, given: Operands, sms: int
) -> None:
    """Check the kernel's results against the formula, and that spare tiles are unchanged."""
    out = run(device, tile, output, given, sms).cpu()
    assert torch.equal(out[: given.used], given.expected(out.dtype))
    assert out[given.used :].isnan().all()


def stored(tile: Tile, n: int, boxes: bool) -> EpilogueConfig:
    """Epilogue of a bfloat16 result, by TMA boxes if possible, or element by element."""
    output = with_store(EpilogueConfig(), tile, n)
    assert output.boxes or not boxes
    return replace(output, boxes=boxes)
