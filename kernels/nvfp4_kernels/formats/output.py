"""Format of an op's result, passed as ``output``: floating point, or quantised for a GEMM."""

from typing import NamedTuple

import torch
from torch import Tensor

from nvfp4_kernels.checks import InvalidArgument, check_dtype, check_shape
from nvfp4_kernels.formats.terms import check_terms


class Static(NamedTuple):
    """NVFP4 with a calibrated global scale.

    Attributes:
        global_scale: float32, ModelOpt's ``input_scale`` of the next GEMM: ``()`` for the whole
            result or, for a grouped GEMM, ``(experts,)``.
        terms: number of NVFP4 terms of the result, 1 to 4.
    """

    global_scale: Tensor
    terms: int = 1


class PerToken(NamedTuple):
    """NVFP4 with a global scale for each token, computed from the token's values.

    Attributes:
        terms: number of NVFP4 terms of the result, 1 to 4.
    """

    terms: int = 1


class StaticFp8(NamedTuple):
    """E4M3 with a calibrated scale, in the order of ``formats.fp8_rows``.

    Attributes:
        scale: float32 ``()``, the value of E4M3's 1.0: the largest magnitude of the calibration
            text divided by 448.
    """

    scale: Tensor


class PerTokenFp8(NamedTuple):
    """E4M3 with a scale for each token, computed from the token's values; see ``StaticFp8``."""


Nvfp4Output = Static | PerToken
Fp8Output = StaticFp8 | PerTokenFp8
# None: floating point, of the dtype that the op documents.
Output = Static | PerToken | StaticFp8 | PerTokenFp8 | None


def check_static(output: Static, name: str = "output") -> None:
    """Check the scale and the number of terms of a statically scaled result.

    Raises:
        InvalidArgument: the scale is not float32 ``()``, or the number of terms is not 1 to 4.
    """
    check_dtype(f"{name}.global_scale", output.global_scale, (torch.float32,))
    check_shape(f"{name}.global_scale", output.global_scale, (), "for a scale per token: PerToken")
    check_terms(f"{name}.terms", output.terms)


def check_static_fp8(output: StaticFp8, name: str = "output") -> None:
    """Raise unless the scale of a statically scaled E4M3 result is float32 ``()``."""
    check_dtype(f"{name}.scale", output.scale, (torch.float32,))
    check_shape(f"{name}.scale", output.scale, (), "for a scale per token: PerTokenFp8")


def refuse_output(output: object, accepted: str, name: str = "output") -> InvalidArgument:
    """Build the error for an output format that an op does not support.

    Args:
        output: the argument as passed.
        accepted: formats that the op accepts, e.g. ``"None or Static(global_scale, terms)"``.
        name: name of the argument.
    """
    came = "None" if output is None else f"a {type(output).__name__}"
    return InvalidArgument(f"{name}: is {came}, must be {accepted}")
