"""``grouped_gemm`` in torch: the reference, which is also the CPU kernel."""

import torch
from torch import Tensor

from nvfp4_kernels.activation import Activation
from nvfp4_kernels.formats.fragments import blocked_weight
from nvfp4_kernels.formats.nvfp4 import product_with_weight
from nvfp4_kernels.formats.terms import data_shape, decode_terms, quantize_terms, scales_shape
from nvfp4_kernels.gemm.call import GroupedGemmCall


def grouped_gemm(call: GroupedGemmCall) -> tuple[Tensor, Tensor | None]:
    """See ``nvfp4_kernels.gemm.grouped.op``; the second result is None for floating-point output.

    With pairs of weights and a gated activation this is also ``grouped_silu_mul_gemm``.
    """
    out, out_scales = _empty(call)
    experts = call.groups[1 : 1 + int(call.groups[0])].long()
    for expert in experts.unique().tolist():
        tiles = (experts == expert).nonzero().squeeze(1)
        result = _activated(_products(call, expert, tiles), call.activation)
        if out_scales is None or call.output is None:
            out[tiles] = result.to(call.out_dtype)
        else:
            scale, terms = call.output
            data, scales = quantize_terms(result, scale[expert], terms)
            out[tiles], out_scales.view(torch.uint8)[tiles] = data, scales.view(torch.uint8)
    return out, out_scales


def _products(call: GroupedGemmCall, expert: int, tiles: Tensor) -> list[Tensor]:
    """Products of an expert's token tiles with each weight of the expert, scaled, plus bias."""
    values = call.a[tiles]
    if call.a_scales is None:
        values = values.float()
    else:
        values = decode_terms(values, call.a_scales[tiles], call.terms)
    b, b_scales = call.b[expert], call.b_scales[expert]
    matrices = [(b, b_scales)] if call.alpha.ndim == 1 else zip(b, b_scales, strict=True)
    products = []
    for index, matrix in enumerate(matrices):
        weight = blocked_weight(*matrix, call.rows, values.shape[-1])
        scale = call.alpha[expert].reshape(-1)[index]
        products.append(product_with_weight(values, *weight).mul_(scale))
        if call.row_scale is not None:
            products[-1].mul_(call.row_scale[tiles].unsqueeze(-1))
        if call.bias is not None:
            products[-1].add_(call.bias[expert].view(-1, call.rows)[index].float())
    return products


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
    terms = call.output.terms
    data = a.new_zeros(data_shape((tiles,), rows, n, terms), dtype=torch.uint8)
    scales = a.new_zeros(scales_shape((tiles,), rows, n, terms), dtype=torch.uint8)
    return data, scales.view(torch.float8_e4m3fn)
