"""``grouped_gemm`` in torch: the reference, which is also the CPU kernel."""

import torch
from torch import Tensor

from nvfp4_kernels.activation import Activation
from nvfp4_kernels.formats.fp8_rows import padded, quantize_fp8
from nvfp4_kernels.formats.output import StaticFp8
from nvfp4_kernels.formats.terms import data_shape, quantize_terms, scales_shape
from nvfp4_kernels.gemm.call import GroupedGemmCall
from nvfp4_kernels.gemm.reference import is_folded, product, values_of


def grouped_gemm(call: GroupedGemmCall) -> tuple[Tensor, Tensor | None]:
    """See ``nvfp4_kernels.gemm.grouped.op``; the second result is None for floating-point output.

    With pairs of weights and a gated activation this is also ``grouped_silu_mul_gemm``.
    """
    out, out_scales = _empty(call)
    experts = call.groups[1 : 1 + int(call.groups[0])].long()
    for expert in experts.unique().tolist():
        tiles = (experts == expert).nonzero().squeeze(1)
        result = _activated(_products(call, expert, tiles), call.activation)
        if call.output is None:
            out[tiles] = result.to(call.out_dtype)
        elif isinstance(call.output, StaticFp8):
            rows = quantize_fp8(result, call.output.scale[expert])
            out.view(torch.uint8)[tiles] = rows.view(torch.uint8)
        else:
            scale, terms = call.output
            data, scales = quantize_terms(result, scale[expert], terms)
            assert out_scales is not None
            out[tiles], out_scales.view(torch.uint8)[tiles] = data, scales.view(torch.uint8)
    return out, out_scales


def _products(call: GroupedGemmCall, expert: int, tiles: Tensor) -> list[Tensor]:
    """Products of an expert's token tiles with each weight of the expert, scaled, plus bias."""
    raw = _rows_of(call.a, tiles)
    a_scales = None if call.a_scales is None else call.a_scales[tiles]
    values = values_of(call._replace(a=raw, a_scales=a_scales))
    b, b_scales, factors = call.b[expert], call.b_scales[expert], call.alpha[expert]
    paired = factors.ndim > is_folded(b_scales)  # gate and up
    matrices = zip(b, b_scales, factors, strict=True) if paired else [(b, b_scales, factors)]
    products = []
    for index, (data, scales, factor) in enumerate(matrices):
        products.append(product(values, data, scales, call.rows).mul_(factor))
        if call.row_scale is not None:
            products[-1].mul_(call.row_scale[tiles].unsqueeze(-1))
        if call.bias is not None:
            products[-1].add_(call.bias[expert].view(-1, call.rows)[index].float())
    return products


def _rows_of(a: Tensor, tiles: Tensor) -> Tensor:
    """Token tiles of ``a``; torch indexes no float8 on a CPU."""
    if a.dtype == torch.float8_e4m3fn:
        return a.view(torch.uint8)[tiles].view(a.dtype)
    return a[tiles]


def _activated(products: list[Tensor], activation: Activation | None) -> Tensor:
    if activation is None:
        return products[0]
    if len(products) == 2:
        return activation.gated(*products)
    return activation.ungated(products[0])


def _empty(call: GroupedGemmCall) -> tuple[Tensor, Tensor | None]:
    a, tiles, rows, n = call.a, call.a.shape[0], call.a.shape[-2], call.rows
    if call.output is None:
        return a.new_zeros((tiles, rows, n), dtype=call.out_dtype), None
    if isinstance(call.output, StaticFp8):
        return a.new_zeros((tiles, rows, padded(n)), dtype=torch.float8_e4m3fn), None
    terms = call.output.terms
    data = a.new_zeros(data_shape((tiles,), rows, n, terms), dtype=torch.uint8)
    scales = a.new_zeros(scales_shape((tiles,), rows, n, terms), dtype=torch.uint8)
    return data, scales.view(torch.float8_e4m3fn)
