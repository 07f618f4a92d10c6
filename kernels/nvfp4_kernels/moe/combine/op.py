"""``moe_combine``: weighted sum of each token's expert outputs (unpermute, finalize)."""

import torch
from torch import Tensor

from nvfp4_kernels.checks import InvalidArgument, check_dtype, check_same_device, check_shape
from nvfp4_kernels.devices import is_reference_device
from nvfp4_kernels.moe.combine.kernels import KERNELS

FLOAT_DTYPES = (torch.bfloat16, torch.float16, torch.float32)


def moe_combine(
    y: Tensor,
    rows: Tensor,
    topk_weights: Tensor | None = None,
    out_dtype: torch.dtype = torch.bfloat16,
) -> Tensor:
    """Sum each token's weighted expert outputs in float32, in slot order; round to ``out_dtype``.

    Each product is rounded to float32 before the addition. A token's result depends on the slots of
    that token alone. On a GPU all tensors must be contiguous and 16-byte aligned.

    Args:
        y: bfloat16, float16 or float32 ``(tiles, T, H)``, expert outputs in token tiles. On a GPU
            a row is a multiple of 16 bytes.
        rows: int32 ``(M, k)``, of a ``Routing``: row of each slot in ``y``, -1 for none; a token
            without rows gets zeros. Indices past y's last row are refused on CPU only.
        topk_weights: float32 ``(M, k)``, ignored for slots without a row; None: ones.
        out_dtype: bfloat16, float16 or float32.

    Returns:
        ``(M, H)`` of ``out_dtype``.

    Raises:
        InvalidArgument: an unsupported dtype, shape or alignment; the message names it.
        NoKernelError: no kernel for this device.
    """
    return torch.ops.nvfp4.moe_combine(y, rows, topk_weights, out_dtype)


@torch.library.custom_op("nvfp4::moe_combine", mutates_args=())
def _moe_combine(
    y: Tensor, rows: Tensor, topk_weights: Tensor | None, out_dtype: torch.dtype
) -> Tensor:
    check_dtype("y", y, FLOAT_DTYPES)
    if y.ndim != 3:
        raise InvalidArgument(
            f"y: shape is {tuple(y.shape)}, must be (tiles, T, H); give what grouped_gemm() returns"
        )
    check_dtype("rows", rows, (torch.int32,))
    if rows.ndim != 2:
        raise InvalidArgument(
            f"rows: shape is {tuple(rows.shape)}, must be (M, k); take those of moe_route()"
        )
    if topk_weights is not None:
        check_dtype("topk_weights", topk_weights, (torch.float32,))
        check_shape("topk_weights", topk_weights, rows.shape, "one weight for each slot of rows")
    if out_dtype not in FLOAT_DTYPES:
        raise InvalidArgument(
            f"out_dtype: is {out_dtype}, must be bfloat16, float16 or float32; choose one"
        )
    check_same_device(y=y, rows=rows, topk_weights=topk_weights)
    if (
        is_reference_device(y.device)
        and rows.numel()
        and int(rows.max()) >= y.shape[0] * y.shape[1]
    ):
        raise InvalidArgument(
            f"rows: holds {int(rows.max())}, must be below {y.shape[0] * y.shape[1]}, the rows of "
            "y's tiles; take those of the Routing that y was made with"
        )
    kernel = KERNELS.select(y.device, "float").load()
    return kernel(y, rows, topk_weights, out_dtype)


@_moe_combine.register_fake
def _(y: Tensor, rows: Tensor, topk_weights: Tensor | None, out_dtype: torch.dtype) -> Tensor:
    return y.new_empty((rows.shape[0], y.shape[2]), dtype=out_dtype)
