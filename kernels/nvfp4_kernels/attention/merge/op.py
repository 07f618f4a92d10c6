"""``merge_segments``: merge results of attention over disjoint sets of keys."""

import torch
from torch import Tensor

from nvfp4_kernels.attention.merge.kernels import KERNELS
from nvfp4_kernels.checks import InvalidArgument, check_dtype, check_same_device, check_shape
from nvfp4_kernels.devices import dtype_name

DTYPES = (torch.float32, torch.bfloat16, torch.float16)


def merge_segments(
    outs: Tensor,
    lses: Tensor,
    sinks: Tensor | None = None,
    out_dtype: torch.dtype | None = None,
) -> tuple[Tensor, Tensor]:
    """Merge attention over each of S segments of the keys into attention over all keys.

    ``out = Σ exp(lse_s − lse) · out_s`` with ``lse = ln(Σ exp(lse_s) + exp(sink))``, in float32,
    added up in the order of the segments. A segment without keys has an ``lse`` of −inf or +inf and
    an arbitrary ``out``. For a row without keys in any segment the merged ``out`` is 0, and ``lse``
    is −inf or the head's sink.

    Args:
        outs: float32, bfloat16 or float16 ``(S, ..., D)``, S at least 1; on sm_100 contiguous,
            16-byte aligned, and D elements a multiple of 16 bytes.
        lses: float32 ``(S, ...)``, natural logarithms of the sums of exponentials of the logits;
            on sm_100 contiguous.
        sinks: float32 ``(H,)``, H the last dimension of ``lses``: a logit per head that adds to the
            softmax's sum and has no value; ``lses`` must not already include sinks.
        out_dtype: float32, bfloat16 or float16; None: the dtype of ``outs``.

    Returns:
        ``out`` ``(..., D)`` of ``out_dtype``, and ``lse`` float32 ``(...)``, as exact as ``lses``:
        on sm_100, ``lses`` of attention over a float8_e4m3fn cache may be off by 1.02e-4 (see
        ``paged_attention``), which also enters the segments' weights in ``out``.

    Raises:
        InvalidArgument: an unsupported or inconsistent argument; the message names it.
        NoKernelError: no kernel for this device.
    """
    check_dtype("outs", outs, DTYPES)
    return torch.ops.nvfp4.merge_segments(outs, lses, sinks, out_dtype or outs.dtype)


def _check(outs: Tensor, lses: Tensor, sinks: Tensor | None, out_dtype: torch.dtype) -> None:
    check_dtype("outs", outs, DTYPES)
    if outs.ndim < 2 or outs.shape[0] == 0 or outs.shape[-1] == 0:
        raise InvalidArgument(
            f"outs: shape is {tuple(outs.shape)}, must be (S, ..., D) with S and D at least 1; "
            "stack() the segments' results"
        )
    check_dtype("lses", lses, (torch.float32,))
    check_shape("lses", lses, outs.shape[:-1], "one per row of outs")
    if sinks is not None:
        check_dtype("sinks", sinks, (torch.float32,))
        if lses.ndim < 2:
            raise InvalidArgument(
                f"lses: shape is {tuple(lses.shape)}, must be (S, ..., H) with sinks; unsqueeze it"
            )
        check_shape("sinks", sinks, lses.shape[-1:], "one per head, the last dimension of lses")
    if out_dtype not in DTYPES:
        names = ", ".join(dtype_name(d) for d in DTYPES)
        raise InvalidArgument(
            f"out_dtype: is {str(out_dtype).removeprefix('torch.')}, must be one of {names}; "
            "convert the result"
        )
    check_same_device(outs=outs, lses=lses, sinks=sinks)


@torch.library.custom_op("nvfp4::merge_segments", mutates_args=())
def _merge_segments(
    outs: Tensor, lses: Tensor, sinks: Tensor | None, out_dtype: torch.dtype
) -> tuple[Tensor, Tensor]:
    _check(outs, lses, sinks, out_dtype)
    kernel = KERNELS.select(outs.device, "float").load()
    return kernel(outs, lses, sinks, out_dtype)


@_merge_segments.register_fake
def _(
    outs: Tensor, lses: Tensor, sinks: Tensor | None, out_dtype: torch.dtype
) -> tuple[Tensor, Tensor]:
    return outs.new_empty(outs.shape[1:], dtype=out_dtype), lses.new_empty(lses.shape[1:])
