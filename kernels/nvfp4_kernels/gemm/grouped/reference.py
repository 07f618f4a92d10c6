"""``grouped_gemm`` in torch: the formula, and the kernel on CPU."""

import torch
from torch import Tensor

from nvfp4_kernels.activation import Activation
from nvfp4_kernels.formats.fragments import blocked_weight
from nvfp4_kernels.formats.nvfp4 import product_with_weight
from nvfp4_kernels.formats.terms import data_shape, decode_terms, quantize_terms, scales_shape


def grouped_gemm(
    a: Tensor,
    a_scales: Tensor | None,
    groups: Tensor,
    b: Tensor,
    b_scales: Tensor,
    alpha: Tensor,
    row_scale: Tensor | None,
    n: int,
    out_global_scale: Tensor | None,
    activation: Activation | None,
    out_dtype: torch.dtype,
    terms: int = 1,
    out_terms: int = 1,
    routed_before: bool = False,
    bias: Tensor | None = None,
    global_experts: int | None = None,
) -> tuple[Tensor, Tensor | None]:
    """See ``nvfp4_kernels.gemm.grouped.op``; the second result is None for 16-bit output.

    ``b`` and ``alpha`` may be gate and up, ``(experts, 2, …)``, with a gated ``activation``.
    ``routed_before`` and ``global_experts`` are unused on a CPU.
    """
    out, out_scales = _empty(a, n, out_global_scale, out_dtype, terms, out_terms)
    experts = groups[1 : 1 + int(groups[0])].long()
    for expert in experts.unique().tolist():
        tiles = (experts == expert).nonzero().squeeze(1)
        values = _values(a[tiles], None if a_scales is None else a_scales[tiles], terms)
        products = []
        matrices = _matrices(b[expert], b_scales[expert], alpha)
        for index, (data, scales) in enumerate(matrices):
            scale = alpha[expert].reshape(-1)[index]
            weight = blocked_weight(data, scales, n, values.shape[-1])
            products.append(product_with_weight(values, *weight).mul_(scale))
            if row_scale is not None:
                products[-1].mul_(row_scale[tiles].unsqueeze(-1))
            if bias is not None:
                products[-1].add_(bias[expert].view(-1, n)[index].float())
        result = _activated(products, activation)
        if out_scales is None or out_global_scale is None:
            out[tiles] = result.to(out_dtype)
        else:
            data, scales = quantize_terms(result, out_global_scale[expert], out_terms)
            out[tiles], out_scales.view(torch.uint8)[tiles] = data, scales.view(torch.uint8)
    return out, out_scales


def _values(a: Tensor, a_scales: Tensor | None, terms: int) -> Tensor:
    return a.float() if a_scales is None else decode_terms(a, a_scales, terms)


def _matrices(b: Tensor, b_scales: Tensor, alpha: Tensor) -> list[tuple[Tensor, Tensor]]:
    """Data and scales of each of an expert's weights."""
    if alpha.ndim == 1:
        return [(b, b_scales)]
    return list(zip(b, b_scales, strict=True))


def _activated(products: list[Tensor], activation: Activation | None) -> Tensor:
    if activation is None:
        return products[0]
    if len(products) == 2:
        return activation.gated(*products)
    return activation.ungated(products[0])


def _empty(
    a: Tensor,
    n: int,
    out_global_scale: Tensor | None,
    out_dtype: torch.dtype,
    terms: int,
    out_terms: int,
) -> tuple[Tensor, Tensor | None]:
    tiles, rows = a.shape[0], a.shape[-2]
    if out_global_scale is None:
        return a.new_zeros((tiles, rows, n), dtype=out_dtype), None
    data = a.new_zeros(data_shape((tiles,), rows, n, out_terms), dtype=torch.uint8)
    scales = a.new_zeros(scales_shape((tiles,), rows, n, out_terms), dtype=torch.uint8)
    return data, scales.view(torch.float8_e4m3fn)
