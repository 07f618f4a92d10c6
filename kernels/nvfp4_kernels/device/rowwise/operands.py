"""Host side of row-wise kernels: layout of input rows, checks, allocation of outputs."""

from dataclasses import dataclass

import torch
from torch import Tensor

from nvfp4_kernels.checks import InvalidArgument
from nvfp4_kernels.formats.terms import data_shape, scales_shape

FLOAT_DTYPES = (torch.bfloat16, torch.float16, torch.float32)
ALIGNMENT = 32  # bytes a thread loads at once on sm_100


@dataclass(frozen=True)
class Rows:
    """Layout of ``batch`` matrices of ``m`` rows of ``k`` elements.

    Rows, also of different matrices, are ``stride`` elements apart.
    """

    m: int
    k: int
    batch: int
    stride: int

    @property
    def count(self) -> int:
        return self.batch * self.m


def check_rows(name: str, x: Tensor) -> None:
    """Raise unless ``x`` is ``(..., M, K)`` with K above 0."""
    if x.ndim < 2:
        raise InvalidArgument(
            f"{name}: shape is {tuple(x.shape)}, must have at least 2 dimensions (..., M, K); "
            "unsqueeze it"
        )
    if x.shape[-1] == 0:
        raise InvalidArgument(f"{name}: K is 0, must be positive; leave empty layers out")


def rows_of(name: str, x: Tensor, alignment: int = ALIGNMENT) -> Rows:
    """Layout of the rows of ``x`` ``(..., M, K)``.

    Raises:
        InvalidArgument: the last dimension is not contiguous, the rows are not evenly spaced, or a
            row is not aligned to ``alignment`` bytes.
    """
    *batch, m, k = x.shape
    stride, expected = k, None
    even = x.stride(-1) == 1 or k == 1
    for size, apart in zip(reversed(x.shape[:-1]), reversed(x.stride()[:-1]), strict=True):
        if size == 1:
            continue
        if expected is None:
            stride = apart
        elif apart != expected:
            even = False
        expected = apart * size
    if x.numel() and not even:
        raise InvalidArgument(
            f"{name}: strides are {x.stride()} for shape {tuple(x.shape)}, must keep the elements "
            "of a row side by side and all rows evenly spaced; call contiguous() on it"
        )
    check_aligned(name, x, alignment)
    if stride * x.element_size() % alignment:
        raise InvalidArgument(
            f"{name}: its rows lie {stride * x.element_size()} bytes apart, must be a multiple of "
            f"{alignment}; call contiguous() on it"
        )
    return Rows(m, k, torch.Size(batch).numel(), stride)


def check_vector(name: str, x: Tensor, alignment: int = ALIGNMENT) -> None:
    """Raise unless the 1-D ``x`` can be read ``alignment`` bytes at a time."""
    if not x.is_contiguous():
        raise InvalidArgument(
            f"{name}: stride is {x.stride(0)}, must be 1; call contiguous() on it"
        )
    check_aligned(name, x, alignment)


def check_aligned(name: str, x: Tensor, alignment: int = ALIGNMENT) -> None:
    """Raise unless ``x`` starts on a multiple of ``alignment`` bytes."""
    if x.data_ptr() % alignment:
        raise InvalidArgument(
            f"{name}: starts {x.data_ptr() % alignment} bytes past a multiple of {alignment}, must "
            f"start on one; call clone() on it"
        )


def new_operand(x: Tensor, k: int, terms: int = 1) -> tuple[Tensor, Tensor]:
    """Allocate ``data`` and blocked ``scales`` for as many rows as ``x`` has, of ``k`` elements."""
    batch, rows = x.shape[:-2], x.shape[-2]
    data = x.new_empty(data_shape(batch, rows, k, terms), dtype=torch.uint8)
    scales = x.new_empty(scales_shape(batch, rows, k, terms), dtype=torch.float8_e4m3fn)
    return data, scales


def new_row_scale(x: Tensor) -> Tensor:
    """Allocate float32 global scales, one per row of ``x``."""
    return x.new_empty(x.shape[:-1], dtype=torch.float32)
