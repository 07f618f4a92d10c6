"""Variants (forms) of the norms that quantise, and the check of arguments."""

import math
from typing import Any, NamedTuple

import torch
from torch import Tensor

from nvfp4_kernels.checks import InvalidArgument, check_blocks_of_16, check_dtype, check_shape
from nvfp4_kernels.device.rowwise.operands import (
    FLOAT_DTYPES,
    check_rows,
    new_operand,
    new_row_scale,
)
from nvfp4_kernels.formats.output import PerToken, Static
from nvfp4_kernels.quantize.arguments import check_output
from nvfp4_kernels.quantize.call import RmsNormQuantizeCall


class Form(NamedTuple):
    """Variant of the custom op, whose schema has only the arguments that the variant needs.

    Attributes:
        adds: whether a residual is added.
        per_token: whether each row has its own global scale.
    """

    adds: bool
    per_token: bool

    @property
    def name(self) -> str:
        """Name of the op."""
        return f"{'add_' * self.adds}rms_norm_quantize{'_per_token' * self.per_token}"

    @property
    def parameters(self) -> str:
        """Schema of the parameters."""
        residual, scale = "Tensor residual, " * self.adds, "Tensor global_scale, "
        scale *= not self.per_token
        return f"Tensor x, {residual}Tensor weight, float eps, {scale}int terms"

    @property
    def results(self) -> str:
        """Schema of the results: data, scales, row scales if per token, residual if ``adds``."""
        return f"({', '.join(['Tensor'] * (2 + self.per_token + self.adds))})"

    def call(self, *arguments: Any) -> RmsNormQuantizeCall:
        """Pack the op's positional arguments into a call."""
        given = iter(arguments)
        x, residual = next(given), next(given) if self.adds else None
        weight, eps = next(given), next(given)
        scale = None if self.per_token else next(given)
        return RmsNormQuantizeCall(x, residual, weight, eps, scale, next(given))

    def fake(self, *arguments: Any) -> tuple[Tensor, ...]:
        """Fake-tensor results of the op."""
        call = self.call(*arguments)
        row_scale = (new_row_scale(call.x),) if self.per_token else ()
        residual = (call.x.new_empty(call.x.shape),) if self.adds else ()
        return (*new_operand(call.x, call.x.shape[-1], call.terms), *row_scale, *residual)


FORMS = [Form(adds, per_token) for adds in (False, True) for per_token in (False, True)]


def check(call: RmsNormQuantizeCall, form: Form) -> None:
    """Check the arguments of a norm that quantises.

    Tensors that the op's ``form`` requires must not be None, which torch's dispatcher accepts for
    any tensor.
    """
    x, operands = call.x, {"x": call.x, "weight": call.weight}
    check_dtype("x", x, FLOAT_DTYPES)
    check_rows("x", x)
    check_blocks_of_16("x", x.shape)
    check_dtype("weight", call.weight, tuple(dict.fromkeys((x.dtype, torch.float32))))
    check_shape("weight", call.weight, x.shape[-1:], "one factor per column of x")
    if not (math.isfinite(call.eps) and call.eps >= 0):
        raise InvalidArgument(
            f"eps: is {call.eps}, must be 0 or more and finite; models use 1e-5 or so"
        )
    if form.adds:
        residual: Any = call.residual
        check_dtype("residual", residual, (x.dtype,))
        check_shape("residual", residual, x.shape, "one value for each of x")
        operands["residual"] = residual
    scale: Any = call.global_scale
    output = PerToken(call.terms) if form.per_token else Static(scale, call.terms)
    check_output(output, **operands)
