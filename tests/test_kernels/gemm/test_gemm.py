"""``gemm``: D = alpha · row_scale · (A · Bᵀ) + bias."""

from dataclasses import replace

import pytest
import torch
from vllm.model_executor.layers.quantization.utils.nvfp4_emulation_utils import (
    run_nvfp4_emulations,
)
from vllm.platforms import current_platform

from nvfp4_kernels import InvalidArgument, PerToken, Static, gemm, gemv, quantize
from nvfp4_kernels.formats import nvfp4
from nvfp4_kernels.formats.nvfp4 import (
    block_scaled_product,
    global_scale_of,
    quantize_weight,
    to_blocked,
)
from nvfp4_kernels.gemm import op as gemm_op
from tests.test_kernels.compilation import check_compiled, check_op
from tests.test_kernels.gemm.linear_cases import (
    ROUNDOFF,
    Case,
    LinearOp,
    check_close,
    check_exact,
    grid_problem,
    random_problem,
)
from tests.test_kernels.gemm.refused import (
    EVERY_MISTAKE,
    below_the_dispatcher,
    check_devices,
    check_refused,
)

BF16, FP16, FP32 = torch.bfloat16, torch.float16, torch.float32

CASES = {
    "one tile": Case(128, 128, 64),
    "one block": Case(1, 1, 16),
    "one row": Case(1, 256, 128),
    "no rows": Case(0, 128, 64),
    "ragged": Case(131, 200, 80),
    "odd number of blocks": Case(5, 129, 16 * 13),
    "narrower than an atom": Case(33, 48, 96),
    "several row tiles": Case(300, 384, 192),
    "bf16 out": Case(9, 130, 96, out_dtype=BF16),
    "fp16 out": Case(9, 130, 96, out_dtype=FP16),
    "qkv shards": Case(7, 96 + 32 + 32, 128, shards=(96, 32, 32), out_dtype=BF16),
    "shards inside an atom": Case(7, 100, 64, shards=(1, 3, 96)),
    "an empty shard": Case(7, 64, 64, shards=(32, 0, 32)),
    "row scale": Case(37, 130, 96, row_scale=True),
    "bias": Case(37, 130, 96, bias=BF16),
    "everything": Case(
        37, 160, 96, shards=(100, 60), row_scale=True, bias=FP32, batch=(2,), out_dtype=BF16
    ),
    "batch": Case(5, 130, 48, batch=(3,)),
    "batch of batches": Case(5, 130, 48, batch=(2, 3), row_scale=True),
    "empty batch": Case(5, 130, 48, batch=(0,)),
    "batched weight": Case(5, 130, 48, batch=(3,), batched_weight=True),
    "batched weight, rows": Case(129, 300, 80, batch=(2, 2), batched_weight=True, row_scale=True),
    "2 terms, one row": Case(1, 256, 128, terms=2),
    "3 terms, everything": Case(
        29,
        160,
        96,
        shards=(100, 60),
        row_scale=True,
        bias=FP32,
        batch=(2,),
        out_dtype=BF16,
        terms=3,
    ),
    "4 terms, 33 rows": Case(33, 130, 96, terms=4),
    "3 terms, ragged": Case(131, 200, 80, terms=3),
    "2 terms, batched weight": Case(5, 130, 48, batch=(3,), batched_weight=True, terms=2),
    "4 terms, no rows": Case(0, 128, 64, terms=4),
    "w4a16 bf16": Case(37, 130, 96, a_dtype=BF16, out_dtype=BF16),
    "w4a16 fp16": Case(37, 130, 96, a_dtype=FP16, out_dtype=FP16),
    "w4a16 everything": Case(
        6, 160, 96, shards=(100, 60), bias=FP16, batch=(2,), batched_weight=True, a_dtype=BF16
    ),
    "w4a16 no rows": Case(0, 130, 96, a_dtype=BF16),
    "Qwen3 0.6B qkv, N/4": Case(17, 1024, 1024, shards=(512, 256, 256), out_dtype=BF16),
    "Llama 3 8B gate_up, N/32": Case(4, 896, 4096, shards=(448, 448), out_dtype=BF16),
    "DeepSeek V3 kv_a, N/9": Case(3, 64, 7168, out_dtype=BF16),
}
EVERY_CASE = pytest.mark.parametrize("case", CASES.values(), ids=CASES)


@EVERY_CASE
def test_exact_on_grid_values(case: Case) -> None:
    check_exact(gemm, case)


@EVERY_CASE
def test_close_on_random_values(case: Case) -> None:
    check_close(gemm, case)


@pytest.mark.parametrize("elements", [1, 20_000, 1 << 24])
def test_a_weight_decoded_in_pieces_gives_the_same(
    elements: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    args = grid_problem(CASES["batched weight, rows"]).args
    operands = {name: args[name] for name in ("a", "a_scales", "b", "b_scales")}
    whole = block_scaled_product(**operands)
    monkeypatch.setattr(nvfp4, "_DECODED_ELEMENTS", elements)
    assert torch.equal(block_scaled_product(**operands), whole)


def test_nan_scale_reaches_the_output() -> None:
    args = grid_problem(CASES["one tile"]).args
    args["a_scales"].view(torch.uint8)[0, 0, 5, 0] = 0x7F  # row 5, k 0 to 15
    out = gemm(**args)
    assert out.isnan().any(-1).nonzero().flatten().tolist() == [5]


# --- vLLM -------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("m", "n", "k"), [(1, 128, 64), (37, 200, 256), (4, 64, 1024)], ids=["M=1", "ragged", "long K"]
)
def test_against_vllm(m: int, n: int, k: int) -> None:
    """Emulation in vLLM rounds both dequantised operands to bfloat16, and then the product.

    Each operand adds a relative error of 2⁻⁸ to a product; both results are rounded to bfloat16.
    """
    x, weight = torch.randn(m, k, dtype=BF16), quantize_weight(torch.randn(n, k)).to_blocked()
    input_scale = global_scale_of(x)
    data, scales = quantize(x, Static(input_scale))
    alpha = (input_scale * weight.global_scale).reshape(1)
    ours = gemm(data, scales, weight.data, weight.scales, alpha, [n])
    given = x, input_scale.reciprocal(), weight.data, weight.scales, weight.global_scale
    # vLLM's emulation takes GPU tensors on a machine with a GPU.
    device = current_platform.device_type
    theirs = run_nvfp4_emulations(*(tensor.to(device) for tensor in given)).cpu()
    magnitude = (x.double().abs() @ weight.dequantize().double().abs().mT) * 1.25
    u, accumulation = ROUNDOFF[BF16], (k + 3) * ROUNDOFF[FP32]
    bound = (2 * u + u**2 + 2 * accumulation) * magnitude
    bound += u * (ours.double().abs() + theirs.double().abs()) * (1 + u)
    assert bool(((ours.double() - theirs.double()).abs() <= bound).all())


# --- one alpha per shard ----------------------------------------------------------------------


@pytest.mark.parametrize("ratio", [1.0, 2.0, 8.0])
def test_shards_with_their_own_global_scales(ratio: float) -> None:
    """Shards with magnitudes in a ratio r are equally accurate with a scale each.

    A shared scale adds an error of (r-1)².
    """
    weight = torch.randn(128, 256)
    shards = [weight, weight.flip(0) / ratio]
    packed = [quantize_weight(shard) for shard in shards]
    assert packed[1].global_scale == packed[0].global_scale / ratio
    x = torch.randn(64, 256, dtype=BF16)
    data = torch.cat([p.data for p in packed])
    scales = to_blocked(torch.cat([p.scales for p in packed]))

    def error_of_second_shard(alpha: torch.Tensor) -> float:
        out = gemm(x, None, data, scales, alpha, [128, 128], out_dtype=FP32)
        expected = x.double() @ shards[1].double().mT
        error = out[:, 128:].double() - expected
        return float(error.square().sum() / expected.square().sum())

    alpha = torch.stack([p.global_scale for p in packed])
    correct = error_of_second_shard(alpha)
    assert 0.008 < correct < 0.010
    # The result, and its rounding error, come out r times too large.
    largest = error_of_second_shard(alpha.max().repeat(2))
    assert largest == pytest.approx((ratio - 1) ** 2 + correct * ratio**2, rel=0.03)


# --- compilation and errors -------------------------------------------------------------------


@pytest.mark.processes
@pytest.mark.parametrize(
    "name",
    ["everything", "w4a16 everything", "batched weight", "row scale", "3 terms, everything"],
)
def test_opcheck(name: str) -> None:
    check_op(torch.ops.nvfp4.gemm.default, tuple(random_problem(CASES[name]).args.values()))


@pytest.mark.processes
@pytest.mark.parametrize(
    "name", ["everything", "w4a16 everything", "batched weight", "3 terms, ragged"]
)
def test_compiled(name: str) -> None:
    problems = [random_problem(replace(CASES[name], m=m)) for m in (5, 40, 128)]
    graphs = 1 if CASES[name].terms == 1 else 2  # terms share one row of atoms up to 32 rows
    check_compiled(gemm, [((), problem.args) for problem in problems], graphs=graphs)


@EVERY_MISTAKE
def test_refused(what: str) -> None:
    check_refused(gemm, what)


def test_devices() -> None:
    check_devices(below_the_dispatcher(gemm_op._gemm, "gemm"))


# --- quantised output -------------------------------------------------------------------------

QUANTIZED = {name: case for name, case in CASES.items() if case.n % 16 == 0}


def check_quantized(op: LinearOp, case: Case, out_terms: int = 1) -> None:
    """Check that the NVFP4 result of ``op`` is its float32 result, quantised."""
    args = grid_problem(replace(case, out_dtype=FP32)).args
    full = op(**args)
    scale = (full.abs().amax() if full.numel() else torch.ones(())) / 2688
    args.pop("out_dtype")
    data, scales = op(**args, output=Static(scale, out_terms))
    expected_data, expected_scales = quantize(full, Static(scale, out_terms))
    assert torch.equal(data, expected_data)
    assert scales.shape == expected_scales.shape
    assert torch.equal(scales.view(torch.uint8), expected_scales.view(torch.uint8))


@pytest.mark.parametrize("case", QUANTIZED.values(), ids=QUANTIZED)
def test_quantized(case: Case) -> None:
    for out_terms in (1, 3):
        check_quantized(gemm, case, out_terms)


def test_quantized_is_an_op() -> None:
    args = grid_problem(CASES["everything"]).args
    args["out_dtype"] = torch.tensor(0.5)
    for out_terms in (1, 3):
        arguments = (*args.values(), out_terms)
        check_op(torch.ops.nvfp4.gemm_quantized.default, arguments)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (
            {"output": Static(torch.ones(2))},
            r"output.global_scale: shape is \(2,\), must be \(\); one scale for the whole output",
        ),
        (
            {"output": Static(torch.ones((), dtype=BF16))},
            "output.global_scale: dtype is bfloat16, must be float32",
        ),
        ({"output": Static(0.5)}, "output.global_scale: is float, must be a tensor of float32"),
        ({"output": Static(torch.ones(()), 5)}, "output.terms: is 5, must be 1 to 4"),
        (
            {"output": PerToken()},
            r"output: is a PerToken, must be None or Static\(global_scale, terms\)",
        ),
        ({"output": torch.ones(())}, "output: is a Tensor, must be None or Static"),
        ({"out_dtype": FP16}, "out_dtype: is torch.float16 with output=Static.*, must be left out"),
        ({"shard_sizes": (1,)}, "shard_sizes"),
    ],
    ids=["shape", "dtype", "number", "terms", "per token", "tensor", "out_dtype", "shards"],
)
def test_quantized_refused(changes: dict[str, object], message: str) -> None:
    args = grid_problem(CASES["one tile"]).args
    args.pop("out_dtype")
    for op in (gemm, gemv):
        few = args | {"a": args["a"][:5], "a_scales": args["a_scales"][:1]}
        with pytest.raises(InvalidArgument, match=message):
            op(**{**few, "output": Static(torch.ones(())), **changes})


def test_quantized_needs_whole_blocks() -> None:
    args = grid_problem(CASES["ragged"]).args
    args.pop("out_dtype")
    with pytest.raises(InvalidArgument, match="K is 200, must be a multiple of 16"):
        gemm(**args, output=Static(torch.ones(())))
