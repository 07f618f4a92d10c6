"""Result formats of ops that quantise rows: choice of the custom op, and checks."""

from collections.abc import Callable
from typing import Any

from torch import Tensor

from nvfp4_kernels.checks import check_same_device
from nvfp4_kernels.formats.output import PerToken, Static, check_static, refuse_output
from nvfp4_kernels.formats.terms import check_terms

Op = Callable[..., Any]


def op_of(output: Static | PerToken, static: Op, per_token: Op) -> Op:
    """Pick ``static`` or ``per_token``, the custom op for the format ``output``.

    The custom op takes the fields of ``output`` as its last arguments.

    Raises:
        InvalidArgument: ``output`` is not an NVFP4 format.
    """
    if isinstance(output, Static):
        return static
    if isinstance(output, PerToken):
        return per_token
    raise refuse_output(output, "Static(global_scale, terms) or PerToken(terms)")


def check_output(output: Static | PerToken, **operands: Tensor) -> None:
    """Raise unless ``output`` is valid and on the same device as all ``operands``."""
    if isinstance(output, Static):
        check_static(output)
        operands["output.global_scale"] = output.global_scale
    else:
        check_terms("output.terms", output.terms)
    check_same_device(**operands)
