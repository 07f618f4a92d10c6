"""Result format of the ops that quantise rows: choice of the custom op, and checks."""

from collections.abc import Callable
from typing import Any

from torch import Tensor

from nvfp4_kernels.checks import check_same_device
from nvfp4_kernels.formats.output import PerToken, Static, check_static, refuse_output
from nvfp4_kernels.formats.terms import check_terms

Op = Callable[..., Any]


def op_of(output: Static | PerToken, static: Op, per_token: Op) -> Op:
    """Pick the custom op for a result's format; the op's last arguments are ``output``'s fields.

    Raises:
        InvalidArgument: ``output`` is not an NVFP4 format.
    """
    if isinstance(output, Static):
        return static
    if isinstance(output, PerToken):
        return per_token
    raise refuse_output(output, "Static(global_scale, terms) or PerToken(terms)")


def check_output(output: Static | PerToken, **operands: Tensor) -> None:
    """Check the format of a result, and that all tensors are on one device."""
    if isinstance(output, Static):
        check_static(output)
        operands["output.global_scale"] = output.global_scale
    else:
        check_terms("output.terms", output.terms)
    check_same_device(**operands)
