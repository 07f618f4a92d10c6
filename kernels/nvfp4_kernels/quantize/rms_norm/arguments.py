"""Variants (forms) of the norms that quantise, and the check of arguments."""

import math
from itertools import product
from typing import Any, NamedTuple

import torch
from torch import Tensor

from nvfp4_kernels.checks import InvalidArgument, check_blocks_of_16, check_dtype, check_shape
from nvfp4_kernels.device.rowwise.operands import FLOAT_DTYPES, check_rows
from nvfp4_kernels.dispatch import Mode
from nvfp4_kernels.formats.output import (
    Fp8Output,
    Nvfp4Output,
    PerToken,
    PerTokenFp8,
    Static,
    StaticFp8,
)
from nvfp4_kernels.quantize.arguments import check_output, new_result
from nvfp4_kernels.quantize.call import RmsNormQuantizeCall


class Form(NamedTuple):
    """Variant of the custom op, whose schema has only the arguments that the variant needs.

    Attributes:
        adds: whether a residual is added.
        per_token: whether each row has its own scale.
        fp8: whether the result is E4M3, rather than NVFP4.
    """

    adds: bool
    per_token: bool
    fp8: bool = False

    @property
    def name(self) -> str:
        """Name of the op."""
        suffix = "_fp8" * self.fp8 + "_per_token" * self.per_token
        return f"{'add_' * self.adds}rms_norm_quantize{suffix}"

    @property
    def mode(self) -> Mode:
        """Mode of the form's kernels in their table."""
        return "w4a8" if self.fp8 else "w4a4"

    @property
    def parameters(self) -> str:
        """Schema of the parameters."""
        given = ["Tensor x", "Tensor residual", "Tensor weight", "float eps"]
        if not self.adds:
            given.remove("Tensor residual")
        if not self.per_token:
            given.append("Tensor scale" if self.fp8 else "Tensor global_scale")
        return ", ".join([*given, "int terms"] if not self.fp8 else given)

    @property
    def results(self) -> str:
        """Schema of the results: data, scales of NVFP4, row scales, residual if ``adds``."""
        number = 1 + (not self.fp8) + self.per_token + self.adds
        return f"({', '.join(['Tensor'] * number)})" if number > 1 else "Tensor"

    def call(self, *arguments: Any) -> RmsNormQuantizeCall:
        """Pack the op's positional arguments into a call."""
        given = iter(arguments)
        x, residual = next(given), next(given) if self.adds else None
        weight, eps = next(given), next(given)
        formats: dict[tuple[bool, bool], Any] = {
            (False, False): Static, (False, True): PerToken,
            (True, False): StaticFp8, (True, True): PerTokenFp8,
        }  # fmt: skip
        output: Nvfp4Output | Fp8Output = formats[self.fp8, self.per_token](*given)
        return RmsNormQuantizeCall(x, residual, weight, eps, output)

    def returned(self, found: tuple[Tensor, ...]) -> Tensor | tuple[Tensor, ...]:
        """Results of a kernel as the op returns them: a single tensor by itself."""
        return found if len(found) > 1 else found[0]

    def fake(self, *arguments: Any) -> Tensor | tuple[Tensor, ...]:
        """Fake-tensor results of the op."""
        call = self.call(*arguments)
        residual = (call.x.new_empty(call.x.shape),) if self.adds else ()
        return self.returned((*new_result(call.x, call.x.shape[-1], call.output), *residual))


FORMS = [Form(*options) for options in product((False, True), repeat=3)]


def check(call: RmsNormQuantizeCall, form: Form) -> None:
    """Check the arguments of a norm that quantises.

    A residual that the op's ``form`` requires must not be None, which torch's dispatcher accepts
    for any tensor.
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
    check_output(call.output, **operands)
