"""Grouped products of E4M3 tokens with folded weights: exact problems, and a kernel's launch."""

from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from nvfp4_kernels.activation import SILU, Activation
from nvfp4_kernels.formats.folded import FoldedWeight, to_folded
from nvfp4_kernels.formats.fp8_rows import from_rows, padded, quantize_fp8, to_rows
from nvfp4_kernels.formats.nvfp4 import from_blocked
from nvfp4_kernels.formats.output import StaticFp8
from nvfp4_kernels.gemm.call import GroupedGemmCall
from nvfp4_kernels.gemm.grouped.reference import grouped_gemm
from nvfp4_kernels.gemm.sm90.choose import with_store
from nvfp4_kernels.gemm.sm90.tile import EpilogueConfig, Tile
from nvfp4_kernels.runtime.compile import launch
from tests.devices import Emulated, KernelDevice
from tests.test_kernels.gemm.grouped.cases_sm90 import problem_of
from tests.test_kernels.gemm.grouped.grouped_cases import GroupedCase, GroupedProblem
from tests.test_kernels.gemm.grouped.tiles_sm90 import SIGNS, put_tiles
from tests.test_kernels.gemm.test_fp8_sm90 import truncation
from tests.test_kernels.routing_cases import CASES as ROUTINGS
from tests.test_kernels.routing_cases import RoutingCase

BF16, FP16, FP32 = torch.bfloat16, torch.float16, torch.float32
E4M3 = torch.float8_e4m3fn


def case(routing: RoutingCase, n: int, k: int, out: torch.dtype = BF16) -> GroupedCase:
    return GroupedCase(routing, n, k, BF16, out_dtype=out)


def per_token(given: GroupedCase) -> GroupedCase:
    """Copy of a case with a scale for each token."""
    return replace(given, row_scale=True)


CASES = {
    "one token": case(ROUTINGS["one token"], 96, 64),
    "no token": case(ROUTINGS["no token"], 48, 64),
    "nothing routed": case(ROUTINGS["nothing routed"], 48, 64),
    "all to one expert": case(ROUTINGS["all to one expert"], 96, 192),
    "an expert per token": case(ROUTINGS["an expert per token"], 64, 128),
    "ids of no expert": per_token(case(ROUTINGS["ids of no expert"], 160, 96)),
    "linear map": case(ROUTINGS["linear map"], 77, 48),
    "128 experts": case(RoutingCase(5, 8, 128), 64, 64),
    "a long K": case(RoutingCase(2, 1, 4), 64, 2048),
    "tiles of 16": case(RoutingCase(25, 2, 4, 16), 144, 320),
    "tiles of 32": per_token(case(RoutingCase(40, 2, 4, 32), 100, 192)),
    "tiles of 64": case(ROUTINGS["tiles of 64"], 80, 160),
    "tiles of 128": per_token(case(ROUTINGS["tiles of 128"], 136, 192)),
    "tiles of 256": case(ROUTINGS["tiles of 256"], 72, 64),
    "I of GLM 4.5": case(RoutingCase(3, 1, 2), 1408, 64),
    "K of gpt-oss": per_token(case(RoutingCase(3, 1, 2), 64, 2880)),
    "fp16": case(ROUTINGS["tiles of 64"], 64, 64, FP16),
    "bias": replace(case(ROUTINGS["one token"], 77, 96, FP32), bias=BF16),
    "bias, 128 tokens": replace(per_token(case(ROUTINGS["tiles of 128"], 136, 96)), bias=FP16),
    "bias, a long K": replace(case(RoutingCase(2, 1, 4), 64, 2048), bias=FP32),
    "float32 out": case(ROUTINGS["one token"], 96, 64, FP32),
}
EVERY_SIZE = [
    "ids of no expert", "linear map", "K of gpt-oss", "bias",
    *(f"tiles of {t}" for t in (16, 32, 64, 128, 256)),
]  # fmt: skip


def folded_problem(case: GroupedCase, *, gated: bool) -> GroupedProblem:
    """A problem on the CPU; folding is exact, and so is every float32 operation of the products."""
    problem = problem_of(case, gated=gated)
    args = problem.args
    folded = folded_weights(args["b"], args["b_scales"])
    args["a"] = to_rows(args["a"].to(E4M3))
    args["b"], args["b_scales"], args["n"] = folded.data, folded.scales, case.n
    args["alpha"] = args["alpha"].unsqueeze(-1) * folded.row_scale
    return problem


def folded_weights(data: Tensor, blocked: Tensor) -> FoldedWeight:
    """Folded weights of ``(…, N, K/2)``."""
    n, packed = data.shape[-2:]
    folded = to_folded(data, from_blocked(blocked, n, packed // 8))
    assert not folded.row_error.any()
    return folded


def out_scales(experts: int) -> Tensor:
    """Scale of an E4M3 result, another for each expert; some results saturate."""
    return torch.linspace(0.02, 0.3, experts)


def check_results(
    found: Tensor, exact: Tensor, k: int, scale: Tensor | None = None, *, on_gpu: bool = False
) -> None:
    """Compare results of an expert with float32 or float64 values, bit for bit.

    Args:
        found: floating-point results, or rows of E4M3.
        exact: values before they are rounded, ``(…, N)``.
        k: elements of K.
        scale: of E4M3 results.
        on_gpu: whether a GPU added up: sums are then truncated, and compared within a tolerance.
    """
    exact, values, share = exact.float(), found.float(), 2.0**-7
    if scale is not None:
        if not on_gpu:
            assert torch.equal(raw(found), raw(quantize_fp8(exact, scale)))
            return
        limit, share = 448 * float(scale), 2.0**-3
        values = from_rows(found, exact.shape[-1]).float() * scale
        exact = exact.clamp(-limit, limit)
    elif not on_gpu:
        assert torch.equal(found, exact.to(found.dtype))
        return
    margin = share * exact.abs() + 8 * truncation(k, float(exact.abs().max()))
    assert ((values - exact).abs() <= margin).all()


def raw(x: Tensor) -> Tensor:
    """Bytes of ``x``."""
    return x.contiguous().view(torch.uint8)


def call_of(problem: GroupedProblem, activation: Activation | None) -> GroupedGemmCall:
    """The problem's arguments, for the reference."""
    args = problem.args
    operands = ("a", "a_scales", "groups", "b", "b_scales", "alpha", "row_scale")
    given = [args[name] for name in operands]
    return GroupedGemmCall(*given, args.get("bias"), args["n"], activation, args["out_dtype"])


# --- a given tile ---------------------------------------------------------------------------------


@dataclass(frozen=True)
class Operands:
    """A call of a grouped op, all of whose values are exact.

    Attributes:
        call: arguments on the CPU.
        gated: whether experts have pairs of weights; gates are so large that SiLU is the identity.
    """

    call: GroupedGemmCall
    gated: bool

    @property
    def used(self) -> int:
        """Number of tiles in use."""
        return int(self.call.groups[0])

    def expected(self) -> Tensor:
        """Result of the tiles in use, by the reference."""
        out, _ = grouped_gemm(self.call)
        return out[: self.used]


def grid_operands(
    routing: RoutingCase, n: int, k: int, *, gated: bool, fp8: bool = False,
    bias: torch.dtype | None = None,
) -> Operands:  # fmt: skip
    """Operands with a scale for each token; ``fp8``: whether the result is E4M3."""
    given = GroupedCase(routing, n, k, BF16, row_scale=True, out_dtype=BF16, bias=bias)
    problem = problem_of(given, gated=gated)
    args = problem.args
    if gated:
        args["a"] = args["a"].abs() + 1
        args["alpha"][:, 0] *= 2**11
        args["b"][:, 0] &= 0xFF ^ SIGNS
        if bias is not None:
            args["bias"][:, 0] = args["bias"][:, 0].abs() * 2**11
    folded = folded_weights(args["b"], args["b_scales"])
    alpha = args["alpha"].unsqueeze(-1) * folded.row_scale
    a, row_scale = to_rows(args["a"].to(E4M3)), args["row_scale"]
    scales = out_scales(routing.experts) * (2**12 if gated else 1)
    call = GroupedGemmCall(
        a, None, args["groups"], folded.data, folded.scales, alpha, row_scale, args.get("bias"), n,
        SILU if gated else None, BF16, output=StaticFp8(scales) if fp8 else None,
    )  # fmt: skip
    return Operands(call, gated)


def stored(tile: Tile, given: Operands, boxes: bool) -> EpilogueConfig:
    """Epilogue of the result, by TMA boxes if possible, or element by element."""
    call = given.call
    bias = "" if call.bias is None else str(call.bias.dtype).removeprefix("torch.")
    output = EpilogueConfig(
        "float8_e4m3fn",
        "bfloat16" if call.output is None else "float8_e4m3fn",
        per_token=call.row_scale is not None,
        bias=bias,
        activation=call.activation,
    )
    output = with_store(output, tile, call.rows)
    assert output.boxes or not boxes
    return replace(output, boxes=boxes)


def run(
    device: KernelDevice, tile: Tile, output: EpilogueConfig, given: Operands, sms: int
) -> Tensor:
    """Launch one kernel; return all rows, including spare tiles."""
    from nvfp4_kernels.gemm.sm90.kernel import GemmArguments, WeightOnlyGemm

    call, used = given.call, given.used
    tiles, tokens, k = call.a.shape

    def put(name: str, tensor: Tensor | None) -> Any:
        return None if tensor is None else device.put(name, tensor)

    width, dtype = (call.rows, BF16) if call.output is None else (padded(call.rows), E4M3)
    out = device.output("out", torch.empty(tiles, tokens, width, dtype=dtype))
    assert call.row_scale is not None
    arguments = GemmArguments(
        x=put_tiles(device, "a", call.a, used),
        w1=put("b", call.b),
        sfw1=put("b_scales", call.b_scales),
        w2=None,
        sfw2=None,
        out=out,
        alpha=put("alpha", call.alpha),
        bias=put("bias", call.bias),
        m=tiles * tokens,
        n=call.rows,
        k=k,
        sms=sms,
        shard_ends=(0,) * 7,
        groups=put_tiles(device, "groups", call.groups, 1 + used),
        row_scale=put_tiles(device, "row_scale", call.row_scale, used),
        out_scale=put(
            "out_scale", call.output.scale if isinstance(call.output, StaticFp8) else None
        ),
    )
    launch(WeightOnlyGemm(tile, output), arguments)
    return out


def check(
    device: KernelDevice, tile: Tile, output: EpilogueConfig, given: Operands, sms: int
) -> None:
    """Check the kernel's results bit for bit, and that spare tiles are unchanged."""
    out, call, expected = run(device, tile, output, given, sms).cpu(), given.call, given.expected()
    assert out[given.used :].float().isnan().all()
    assert call.output is None or raw(expected).count_nonzero() >= 0.3 * expected.numel()
    if isinstance(device, Emulated):
        assert torch.equal(raw(out[: given.used]), raw(expected))
        return
    exact, _ = grouped_gemm(call._replace(output=None, out_dtype=FP32))
    for at in range(given.used):
        scale = None
        if isinstance(call.output, StaticFp8):
            scale = call.output.scale[call.groups[1 + at]]
        check_results(out[at], exact[at], call.a.shape[-1], scale, on_gpu=True)
