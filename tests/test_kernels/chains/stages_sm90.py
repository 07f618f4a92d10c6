"""Stages of sm_90: every op, on eight tokens of 256 elements; kinds as for sm_100.

Rows in FP8 are E4M3 ``(8, 128)`` or ``(8, 256)``; with a scale per token, a tuple of rows and
scales.
"""

from collections.abc import Callable
from functools import cache, partial
from importlib import import_module

import pytest
import torch
from torch import Tensor

import nvfp4_kernels as ops
from nvfp4_kernels.formats.folded import FoldedWeight, to_folded
from nvfp4_kernels.formats.fp8_rows import quantize_fp8
from nvfp4_kernels.formats.fragments import Fragments, to_fragments
from nvfp4_kernels.formats.nvfp4 import quantize_weight
from nvfp4_kernels.gemm.sm90.choose import with_store
from nvfp4_kernels.gemm.sm90.tile import Tile
from tests.test_kernels.attention.decode.decode_cases import arguments, case
from tests.test_kernels.attention.decode.decode_shapes import Chosen
from tests.test_kernels.chains import stages_experts, stages_sm100
from tests.test_kernels.chains.stage import Stage, Value
from tests.test_kernels.chains.stages_sm100 import (
    EPS,
    HEAD_DIM,
    HIDDEN,
    TOKENS,
    VECTORS,
    flat,
    heads_of,
    new_rows,
)

KINDS = ("rows", "cache", "read cache", "logits", "lists")
GIVEN: dict[str, Callable[[], Value]] = {
    **{kind: stages_sm100.GIVEN[kind] for kind in KINDS},
    **stages_experts.GIVEN,
    **stages_experts.FLOAT_GIVEN,
    **stages_experts.FP8_GIVEN,
    "fp8": lambda: quantize_fp8(new_rows(), torch.tensor(1.0)),
}


@cache
def weight() -> Fragments:
    """Weight of a product, in fragments."""
    w = quantize_weight(torch.randn(HIDDEN, HIDDEN))
    return to_fragments(w.data, w.scales)


@cache
def folded(k: int) -> FoldedWeight:
    """Weight of a product in FP8, ``(HIDDEN, k)``."""
    w = quantize_weight(torch.randn(HIDDEN, k))
    return to_folded(w.data, w.scales)


def product(tile: Tile | None, rows: Tensor, bias: Tensor | None = None) -> tuple[Value, ...]:
    """Result of ``gemm``, on ``tile`` or on the tile of ``choose_config``."""
    with pytest.MonkeyPatch.context() as patch:
        if tile is not None:
            patch.setattr(
                import_module("nvfp4_kernels.gemm.sm90.launch"),
                "choose_config",
                lambda problem, output, sms: (tile, with_store(output, tile, problem.n)),
            )
        return (ops.gemm(rows, None, *weight(), torch.ones(1), [HIDDEN], bias=bias),)


def gated(rows: Tensor) -> tuple[Value, ...]:
    """Result of ``silu_mul_gemm``."""
    pair = (*weight(), *weight())
    return (ops.silu_mul_gemm(rows, None, *pair, torch.ones(2), n=HIDDEN),)


def fp8_product(rows: Value) -> tuple[Value, ...]:
    """Result of ``gemm`` of E4M3 rows."""
    x, row_scale = rows if isinstance(rows, tuple) else (rows, None)
    data, scales, alpha, _ = folded(x.shape[-1])
    return (ops.gemm(x, None, data, scales, alpha, [HIDDEN], row_scale=row_scale),)


def fp8_gated(rows: Value) -> tuple[Value, ...]:
    """E4M3 result of ``silu_mul_gemm`` of E4M3 rows."""
    x, row_scale = rows if isinstance(rows, tuple) else (rows, None)
    data, scales, alpha, _ = folded(x.shape[-1])
    pair = data, scales, data, scales, torch.stack([alpha, alpha])
    output = output_of(per_token=False)
    return (ops.silu_mul_gemm(x, None, *pair, row_scale=row_scale, n=HIDDEN, output=output),)


def added(is_residual: bool, rows: Tensor) -> tuple[Value, ...]:
    """Normalised sum of ``add_rms_norm``."""
    x, residual = (new_rows(), rows) if is_residual else (rows, new_rows())
    return (ops.add_rms_norm(x, residual, torch.ones(HIDDEN).bfloat16(), EPS)[0],)


def output_of(per_token: bool) -> ops.StaticFp8 | ops.PerTokenFp8:
    return ops.PerTokenFp8() if per_token else ops.StaticFp8(torch.tensor(1.0))


def quantized(op: str, per_token: bool, rows: Tensor) -> tuple[Value, ...]:
    """Result of ``quantize`` or ``silu_mul_quantize``."""
    return (getattr(ops, op)(rows, output_of(per_token)),)


def normed(per_token: bool, rows: Tensor) -> tuple[Value, ...]:
    """Result of ``rms_norm_quantize``."""
    factors = torch.ones(HIDDEN).bfloat16()
    return (ops.rms_norm_quantize(rows, factors, EPS, output_of(per_token)),)


def added_quantized(per_token: bool, is_residual: bool, rows: Tensor) -> tuple[Value, ...]:
    """Result of ``add_rms_norm_quantize``, and the new residual."""
    x, residual = (new_rows(), rows) if is_residual else (rows, new_rows())
    factors, output = torch.ones(HIDDEN).bfloat16(), output_of(per_token)
    *result, out = ops.add_rms_norm_quantize(x, residual, factors, EPS, output)
    return tuple(result), out


def rotated(rows: Tensor) -> tuple[Value, ...]:
    """Rotated queries of ``rotary_embedding``, whose keys are the same rows."""
    angles = torch.ones(TOKENS, HEAD_DIM).bfloat16()
    heads = heads_of(rows)
    return (flat(ops.rotary_embedding(torch.arange(TOKENS), heads, heads, angles)[0]),)


def rotated_and_stored(rows: Tensor) -> tuple[Value, ...]:
    """Rotated queries of ``rotary_store``."""
    return stages_sm100.rotated_and_stored(None, rows)[:1]


def decoded(splits: int, what: str, rows: Tensor) -> tuple[Value, ...]:
    """Decode attention; ``rows`` are the vectors that ``what`` names."""
    heads = heads_of(rows)
    problem = case(*range(3, 3 + TOKENS), query_heads=heads.shape[1], heads=1).problem()
    given = arguments(problem, torch.device("cpu"))
    vectors = heads if what == "q" else heads[:, :1]
    with pytest.MonkeyPatch.context() as patch:
        Chosen(splits, keys=32).use(patch)
        return (flat(ops.decode_attention(**given | {what: vectors})),)


PRODUCTS = [
    Stage(name, "gemm", "rows", ("rows",), partial(product, tile))
    for name, tile in {
        "gemm": None,
        "gemm, wgmma": Tile(64, max_stages=2),
        "gemm, K in 2": Tile(8, split_k=2, max_stages=2),
    }.items()
]
QUANTIZERS = [
    Stage("quantize", "quantize", "rows", ("fp8",), partial(quantized, "quantize", False)),
    Stage("quantize per token", "quantize", "rows", ("fp8",), partial(quantized, "quantize", True)),
    Stage(
        "silu_mul_quantize", "quantize", "rows", ("fp8",),
        partial(quantized, "silu_mul_quantize", False),
    ),
    Stage("rms_norm_quantize", "quantize", "rows", ("fp8",), partial(normed, True)),
    Stage(
        "add_rms_norm_quantize, x", "quantize", "rows", ("fp8", "rows"),
        partial(added_quantized, True, False),
    ),
    Stage(
        "add_rms_norm_quantize, residual", "quantize", "rows", ("fp8", "rows"),
        partial(added_quantized, True, True), twin="add_rms_norm_quantize, x",
    ),
]  # fmt: skip
STAGES = [
    *PRODUCTS,
    *QUANTIZERS,
    Stage("silu_mul_gemm", "gemm", "rows", ("rows",), gated),
    Stage("gemm, FP8", "gemm", "fp8", ("rows",), fp8_product),
    Stage("silu_mul_gemm, FP8", "gemm", "fp8", ("fp8",), fp8_gated),
    Stage("add_rms_norm, x", "add_rms_norm", "rows", ("rows",), partial(added, False)),
    Stage(
        "add_rms_norm, residual", "add_rms_norm", "rows", ("rows",), partial(added, True),
        twin="add_rms_norm, x",
    ),
    Stage("rotary_embedding", "rotary_embedding", "rows", ("rows",), rotated),
    Stage("rotary_store", "rotary_store", "rows", ("rows",), rotated_and_stored),
    *(
        Stage(
            f"decode_attention, {what}{', splits' * (splits > 1)}", "decode_attention", "rows",
            ("rows",), partial(decoded, splits, what),
            twin="" if what == "q" else f"decode_attention, q{', splits' * (splits > 1)}",
        )
        for splits in (1, 2)
        for what in ("q", "key", "value")
    ),
    *VECTORS,
    *stages_experts.SM90,
]  # fmt: skip
