"""Result formats of ops that quantise rows: choice of the custom op, checks, memory."""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from nvfp4_kernels.checks import check_same_device
from nvfp4_kernels.device.rowwise.operands import new_operand, new_row_scale
from nvfp4_kernels.dispatch import Mode
from nvfp4_kernels.formats import fp8_rows
from nvfp4_kernels.formats.output import (
    Fp8Output,
    Nvfp4Output,
    PerToken,
    PerTokenFp8,
    Static,
    StaticFp8,
    check_static,
    check_static_fp8,
    refuse_output,
)
from nvfp4_kernels.formats.terms import check_terms

Op = Callable[..., Any]


def op_of(output: Nvfp4Output | Fp8Output, name: str) -> Op:
    """Pick the custom op for the format ``output`` among the ops whose names begin with ``name``.

    The custom op takes the fields of ``output`` as its last arguments.

    Raises:
        InvalidArgument: ``output`` is not a quantised format.
    """
    if not isinstance(output, Static | PerToken | StaticFp8 | PerTokenFp8):
        accepted = "Static(global_scale, terms), PerToken(terms), StaticFp8(scale) or PerTokenFp8()"
        raise refuse_output(output, accepted)
    suffix = "_fp8" * is_fp8(output) + "_per_token" * is_per_token(output)
    return getattr(torch.ops.nvfp4, name + suffix)


def is_fp8(output: Nvfp4Output | Fp8Output) -> bool:
    """Whether a result is E4M3, rather than NVFP4."""
    return isinstance(output, StaticFp8 | PerTokenFp8)


def is_per_token(output: Nvfp4Output | Fp8Output) -> bool:
    """Whether each row of a result has its own scale."""
    return isinstance(output, PerToken | PerTokenFp8)


def mode_of(output: Nvfp4Output | Fp8Output) -> Mode:
    """Arithmetic of the products that read a result."""
    return "w4a8" if is_fp8(output) else "w4a4"


def check_output(output: Nvfp4Output | Fp8Output, **operands: Tensor) -> None:
    """Raise unless ``output`` is valid and on the same device as all ``operands``."""
    if isinstance(output, StaticFp8):
        check_static_fp8(output)
        operands["output.scale"] = output.scale
    elif isinstance(output, Static):
        check_static(output)
        operands["output.global_scale"] = output.global_scale
    elif isinstance(output, PerToken):
        check_terms("output.terms", output.terms)
    check_same_device(**operands)


def new_result(x: Tensor, k: int, output: Nvfp4Output | Fp8Output) -> tuple[Tensor, ...]:
    """Allocate a result in format ``output``, of as many rows as ``x`` has, of ``k`` elements.

    Returns:
        ``data`` and ``scales`` of NVFP4, or E4M3 rows; then ``row_scale`` if each row has its own.
    """
    if isinstance(output, Static | PerToken):
        data: tuple[Tensor, ...] = new_operand(x, k, output.terms)
    else:
        data = (fp8_rows.new_rows(x, k),)
    return (*data, new_row_scale(x)) if is_per_token(output) else data
