"""Argument checks and result shapes that the GEMM ops share."""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from nvfp4_kernels.checks import (
    InvalidArgument,
    check_blocks_of_16,
    check_dtype,
    check_layout,
    check_same_device,
    check_shape,
)
from nvfp4_kernels.devices import dtype_name
from nvfp4_kernels.dispatch import Kernel, Mode, WeightLayout
from nvfp4_kernels.formats.folded import folded_shapes
from nvfp4_kernels.formats.fp8_rows import GROUP, padded
from nvfp4_kernels.formats.fragments import fragment_shapes
from nvfp4_kernels.formats.nvfp4 import BLOCK_SIZE
from nvfp4_kernels.formats.output import Output, Static, StaticFp8, refuse_output
from nvfp4_kernels.formats.terms import check_terms, data_shape, scales_shape
from nvfp4_kernels.gemm.call import AnyCall

OUT_DTYPES = (torch.bfloat16, torch.float16, torch.float32)
A16_DTYPES = (torch.bfloat16, torch.float16)
_NOUNS = {"fragments": "fragments", "folded": "folded data and scales"}
MAX_SHARDS = 8  # of a weight, for kernels; references take any number


def check_output(output: Output, out_dtype: torch.dtype) -> Static | StaticFp8:
    """Check the format of a quantised result, and that ``out_dtype`` is left out.

    Returns:
        ``output``, unchanged.

    Raises:
        InvalidArgument: ``output`` is neither a ``Static`` with a float32 scale and 1 to 4 terms
            nor a ``StaticFp8`` with a float32 scale, or ``out_dtype`` is not the default.
    """
    if isinstance(output, StaticFp8):
        check_dtype("output.scale", output.scale, (torch.float32,))
    elif isinstance(output, Static):
        check_dtype("output.global_scale", output.global_scale, (torch.float32,))
        check_terms("output.terms", output.terms)
    else:
        raise refuse_output(
            output, "None or Static(global_scale, terms), or StaticFp8(scale) for folded weights"
        )
    if out_dtype != torch.bfloat16:
        raise InvalidArgument(
            f"out_dtype: is {out_dtype} with output={type(output).__name__}(…), must be left out, "
            "as output sets the dtype; leave output out for a floating-point result"
        )
    return output


def check_static_output(output: Output, out_dtype: torch.dtype) -> Static:
    """``check_output`` of an op without E4M3 results."""
    if not isinstance(output, Static):
        raise refuse_output(output, "None or Static(global_scale, terms)")
    check_output(output, out_dtype)
    return output


def check_result(call: AnyCall, n: int, scales: tuple[int, ...], remedy: str) -> None:
    """Check the arguments that define the result.

    Args:
        call: the op's arguments.
        n: number of columns of the result.
        scales: shape of the scales of a quantised result.
        remedy: description of ``scales`` for the error message.
    """
    check_out_dtype(call.out_dtype)
    if call.output is None:
        return
    if isinstance(call.output, StaticFp8):
        check_dtype("output.scale", call.output.scale, (torch.float32,))
        check_shape("output.scale", call.output.scale, scales, remedy)
        check_same_device(a=call.a, **{"output.scale": call.output.scale})
        return
    scale, terms = call.output
    check_dtype("output.global_scale", scale, (torch.float32,))
    check_shape("output.global_scale", scale, scales, remedy)
    check_terms("output.terms", terms)
    check_blocks_of_16("output", (1, n))  # the next product's K is this product's N
    check_same_device(a=call.a, **{"output.global_scale": scale})


def check_no_n(n: int | None) -> None:
    """Raise if ``n`` is given: a quantised result needs blocked weights, whose shape gives N."""
    if n is not None:
        raise InvalidArgument(
            f"n: is {n} with output=Static(…), must be left out; a quantised result takes weights "
            "in the blocked layout, which have N rows"
        )


def check_layouts(call: AnyCall, **derived: Tensor | None) -> None:
    """Raise unless the tensors of a call are contiguous and 16-byte aligned, as kernels require.

    The scale of ``output`` is one of the call's tensors. ``derived``: further tensors to check;
    they replace the call's tensors of the same names.
    """
    output = {} if call.output is None else call.output._asdict()
    scales = {f"output.{name}": value for name, value in output.items()}
    for name, value in (call._asdict() | scales | derived).items():
        if isinstance(value, Tensor):
            check_layout(name, value)


def check_number_of_shards(shard_sizes: Sequence[int], arch: str) -> None:
    """Raise if a weight has more shards than the kernels of ``arch`` take."""
    if len(shard_sizes) > MAX_SHARDS:
        raise InvalidArgument(
            f"shard_sizes: {len(shard_sizes)} shards, must be at most {MAX_SHARDS} on {arch}; "
            "split the weight"
        )


def quantized_result(a: Tensor, n: int, terms: int, out_terms: int) -> tuple[Tensor, Tensor]:
    """Allocate packed data and blocked scales of a quantised result of ``n`` columns.

    ``a``: activation of ``terms`` terms, with the result's batch dimensions and rows;
    ``out_terms``: number of the result's terms.
    """
    batch, m = batch_of(a, terms), a.shape[-2]
    data = a.new_empty(data_shape(batch, m, n, out_terms), dtype=torch.uint8)
    scales = a.new_empty(scales_shape(batch, m, n, out_terms), dtype=torch.float8_e4m3fn)
    return data, scales


def fp8_result(a: Tensor, n: int) -> Tensor:
    """Allocate an E4M3 result of ``n`` columns for each row of activation ``a``."""
    return a.new_empty((*a.shape[:-1], padded(n)), dtype=torch.float8_e4m3fn)


def batch_of(a: Tensor, terms: int) -> tuple[int, ...]:
    """Batch dimensions of an activation; with several ``terms``, dimension -3 is the term."""
    return tuple(a.shape[:-2] if terms == 1 else a.shape[:-3])


def check_weight(name: str, b: Tensor, b_scales: Tensor) -> tuple[int, int]:
    """Check a packed weight ``(..., N, K/2)`` and its blocked scales; return (N, K)."""
    return check_operand(name, b, b_scales, terms=1)


def check_operand(name: str, b: Tensor, b_scales: Tensor, terms: int) -> tuple[int, int]:
    """Check a packed operand ``(..., N, K/2)`` and its blocked scales; return (N, K).

    With more than one term, the operand is ``(..., terms, N, K/2)``.
    """
    check_dtype(name, b, (torch.uint8,))
    check_dtype(f"{name}_scales", b_scales, (torch.float8_e4m3fn,))
    if b.ndim < 2:
        raise InvalidArgument(
            f"{name}: shape is {tuple(b.shape)}, must be (..., rows, K/2); unsqueeze it"
        )
    n, k = b.shape[-2], 2 * b.shape[-1]
    _check_k(name, k)
    if terms > 1 and (b.ndim < 3 or b.shape[-3] != terms):
        raise InvalidArgument(
            f"{name}: shape is {tuple(b.shape)}, must be (..., {terms}, rows, K/2) as terms is "
            f"{terms}; quantise it with {terms} terms, or say how many terms it has"
        )
    expected = scales_shape(batch_of(b, terms), n, k, terms)
    remedy = "permute linear scales with to_blocked(), those of several terms with stack_scales()"
    check_shape(f"{name}_scales", b_scales, expected, remedy)
    return n, k


def weight_layout(scales: Tensor) -> WeightLayout:
    """Layout of a weight, by the dtype of its scales."""
    layouts: dict[Any, WeightLayout] = {torch.uint8: "fragments", torch.int32: "folded"}
    return layouts.get(getattr(scales, "dtype", None), "blocked")


def fragments_k(name: str, a: Tensor, a_scales: Tensor | None, layout: WeightLayout) -> int:
    """Check the activation for a weight in fragments or folded; return K, as weights are padded."""
    if layout == "folded":
        return _folded_k(name, a, a_scales)
    if a_scales is not None:
        raise InvalidArgument(
            f"{name}: is in fragments (uint8 {name}_scales), must be blocked for NVFP4 "
            "activations; undo it with from_fragments() and permute its scales with to_blocked(), "
            "or pass 16-bit activations without a_scales"
        )
    check_dtype("a", a, A16_DTYPES)
    if a.ndim < 2 or not a.shape[-1] or a.shape[-1] % BLOCK_SIZE:
        raise InvalidArgument(
            f"a: shape is {tuple(a.shape)}, must be (..., M, K) with K a positive multiple of "
            f"{BLOCK_SIZE}; pad K with zeros"
        )
    return a.shape[-1]


def _folded_k(name: str, a: Tensor, a_scales: Tensor | None) -> int:
    if a_scales is not None or a.dtype != torch.float8_e4m3fn:
        came = "NVFP4" if a_scales is not None else dtype_name(a.dtype)
        raise InvalidArgument(
            f"a: is {came} with a folded weight (int32 {name}_scales), must be float8_e4m3fn "
            "without a_scales; quantise it with output=StaticFp8(scale) or PerTokenFp8()"
        )
    if a.ndim < 2 or not a.shape[-1] or a.shape[-1] % GROUP:
        raise InvalidArgument(
            f"a: shape is {tuple(a.shape)}, must be (..., M, K) with K padded to a positive "
            f"multiple of {GROUP}; make it with quantize()"
        )
    return a.shape[-1]


def layout_shapes(layout: WeightLayout, n: int, k: int) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Shapes of data and scales of a weight ``(n, k)`` in fragments or folded."""
    return folded_shapes(n, k) if layout == "folded" else fragment_shapes(n, k)


def check_fragments(name: str, b: Tensor, b_scales: Tensor, n: int, k: int, n_from: str) -> None:
    """Check a weight ``(n, k)`` in fragments or folded.

    ``n_from``: name of the argument that gives ``n``.
    """
    check_dtype(name, b, (torch.uint8,))
    layout = weight_layout(b_scales)
    data, scales = layout_shapes(layout, n, k)
    remedy = (
        f"the {_NOUNS[layout]} of N = {n} ({n_from}) × K = {k} (a); make them with to_{layout}() "
        "from one matrix, or pass float8_e4m3fn scales with a weight in the blocked layout"
    )
    check_shape(name, b, data, remedy)
    check_shape(f"{name}_scales", b_scales, scales, remedy)


def check_layout_taken(name: str, scales: Tensor, kernel: Kernel) -> None:
    """Raise unless ``kernel`` reads weight ``name`` in its layout, told by ``scales``' dtype."""
    layout = weight_layout(scales)
    if not kernel.takes(layout):
        remedy = f"to_{kernel.weight_layout}()"
        raise InvalidArgument(
            f"{name}: is in the layout {layout!r} ({name}_scales are {dtype_name(scales.dtype)}), "
            f"must be in {kernel.weight_layout!r} for {kernel.label}; make that from the "
            f"checkpoint's weight and linear scales with {remedy}, once, at load"
        )


def _in_words(layout: WeightLayout) -> str:
    return "in fragments" if layout == "fragments" else "folded"


def refuse_fragments(**scales: Tensor) -> None:
    """Raise if a weight is in fragments, which a quantised result forbids.

    ``scales``: scales of each weight, by argument name.
    """
    for name, tensor in scales.items():
        layout = weight_layout(tensor)
        if layout != "blocked":
            raise InvalidArgument(
                f"{name.removesuffix('_scales')}: is {_in_words(layout)} ({name} are "
                f"{dtype_name(tensor.dtype)}), must be in the blocked layout with float8_e4m3fn "
                "scales for output=Static(…); leave output out for a result that is not quantised"
            )


def require_folded(**scales: Tensor) -> None:
    """Raise unless weights are folded, as an E4M3 result requires; ``scales``: by argument name."""
    for name, tensor in scales.items():
        layout = weight_layout(tensor)
        if layout != "folded":
            raise InvalidArgument(
                f"{name.removesuffix('_scales')}: is in the layout {layout!r} ({name} are "
                f"{dtype_name(tensor.dtype)}), must be folded with int32 scales for "
                "output=StaticFp8(…); make it with to_folded(), or leave output out"
            )


def check_activation(
    a: Tensor,
    a_scales: Tensor | None,
    row_scale: Tensor | None,
    k: int,
    terms: int,
    layout: WeightLayout,
) -> tuple[Mode, int]:
    """Check the activation against the weight's K; return the mode and M.

    With ``a_scales`` the activation is NVFP4 (w4a4); if None, 16-bit floating point (w4a16) or,
    with a weight in the folded ``layout``, E4M3 (w4a8).
    """
    check_terms("terms", terms)
    if a_scales is None:
        if terms > 1:
            came, remedy = "16-bit", f"quantise them with {terms} terms and pass a_scales too"
            if layout == "folded":
                came, remedy = "E4M3", "leave terms out"
            raise InvalidArgument(f"terms: is {terms} with {came} activations, must be 1; {remedy}")
        if layout == "folded":
            _check_row_scale(row_scale, tuple(a.shape[:-1]))
            return "w4a8", a.shape[-2]
        check_dtype("a", a, A16_DTYPES)
        if a.ndim < 2 or a.shape[-1] != k:
            raise InvalidArgument(
                f"a: shape is {tuple(a.shape)}, must be (..., M, {k}) to match the weight's K"
            )
        if row_scale is not None:
            raise InvalidArgument(
                "row_scale: given with 16-bit activations, which carry their own scale; "
                "pass a_scales too, or leave row_scale out"
            )
        return "w4a16", a.shape[-2]
    m, a_k = check_operand("a", a, a_scales, terms)
    if a_k != k:
        raise InvalidArgument(f"a: K is {a_k}, must be {k} as the weight's; check the operands")
    _check_row_scale(row_scale, (*batch_of(a, terms), m))
    return "w4a4", m


def _check_row_scale(row_scale: Tensor | None, rows: tuple[int, ...]) -> None:
    if row_scale is not None:
        check_dtype("row_scale", row_scale, (torch.float32,))
        check_shape("row_scale", row_scale, rows, "one global scale per row of a")


def check_shards(alpha: Tensor, shard_sizes: Sequence[int], n: int, layout: WeightLayout) -> None:
    """Check that the shards add up to ``n``, and ``alpha``: a factor per shard, or per row."""
    check_dtype("alpha", alpha, (torch.float32,))
    if layout == "folded":
        check_shape("alpha", alpha, (n,), "one factor per row of a folded weight")
    else:
        check_shape("alpha", alpha, (len(shard_sizes),), "one factor per shard of the output")
    if sum(shard_sizes) != n or min(shard_sizes, default=0) < 0:
        raise InvalidArgument(
            f"shard_sizes: {list(shard_sizes)} adds up to {sum(shard_sizes)}, must be widths that "
            f"add up to N = {n}"
        )


def check_out_dtype(out_dtype: torch.dtype) -> None:
    """Raise unless kernels can write results of dtype ``out_dtype``."""
    if out_dtype not in OUT_DTYPES:
        names = ", ".join(dtype_name(d) for d in OUT_DTYPES)
        raise InvalidArgument(f"out_dtype: is {out_dtype}, must be one of {names}")


def check_bias(bias: Tensor | None, n: int) -> None:
    """Check an optional bias ``(N,)``."""
    if bias is not None:
        check_dtype("bias", bias, OUT_DTYPES)
        check_shape("bias", bias, (n,), "one value per output column")


def check_batch(a: Tensor, name: str, b: Tensor, terms: int = 1) -> None:
    """Raise if weight ``b`` is batched, but with other batch dimensions than activation ``a``."""
    batch = batch_of(a, terms)
    if b.ndim > 2 and batch != tuple(b.shape[:-2]):
        raise InvalidArgument(
            f"{name}: batch dimensions are {tuple(b.shape[:-2])}, must be none or {batch} as a's"
        )


def _check_k(name: str, k: int) -> None:
    if k % BLOCK_SIZE:
        raise InvalidArgument(
            f"{name}: K is {k}, must be a multiple of {BLOCK_SIZE}; pad K with zeros"
        )
