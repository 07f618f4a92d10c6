"""Rows of an NVFP4 operand, for several ops that each write some of the rows."""

from dataclasses import dataclass

import torch
from torch import Tensor

from nvfp4_kernels.checks import InvalidArgument, check_dtype, check_same_device, check_shape
from nvfp4_kernels.formats.nvfp4 import (
    ATOM_COLS,
    ATOM_ROWS,
    BLOCK_SIZE,
    blocked_shape,
    quantize_activation,
)

HEAD_COLUMNS = 2 * BLOCK_SIZE  # D is a multiple of them: 16 bytes of codes
ROW_COLUMNS = ATOM_COLS * BLOCK_SIZE  # H·D is a multiple of them: rows have no padding of scales


@dataclass(frozen=True, eq=False)
class Nvfp4Rows:
    """Output memory for heads in NVFP4: rows of a GEMM operand, from ``first_row`` on.

    Attributes:
        data: uint8 ``(rows, H, D/2)``, contiguous: codes of these rows only.
        scales: float8_e4m3fn, blocked, ``(ceil(M/128), H·D/64, 32, 16)``: block scales of the
            operand's M rows.
        global_scale: float32 ``()``, the factor that multiplies the values.
        first_row: index of the first row among the operand's rows.
    """

    data: Tensor
    scales: Tensor
    global_scale: Tensor
    first_row: int = 0

    def check(self, rows: int, heads: int, head_dim: int) -> None:
        """Check that ``rows`` rows of ``heads`` heads of ``head_dim`` elements fit the memory.

        Raises:
            InvalidArgument: the sizes are unsupported in NVFP4, or ``out`` (data), ``out_scales``,
                ``output.global_scale`` or ``first_row`` does not fit.
        """
        if head_dim % HEAD_COLUMNS or heads * head_dim % ROW_COLUMNS:
            raise InvalidArgument(
                f"q: has {heads} heads of D {head_dim}, must have a D that is a multiple of "
                f"{HEAD_COLUMNS}, and rows that are of {ROW_COLUMNS}, for a result in NVFP4; "
                "quantize() the 16-bit result"
            )
        check_dtype("out", self.data, (torch.uint8,))
        check_shape("out", self.data, (rows, heads, head_dim // 2), "two elements of q to a byte")
        check_dtype("out_scales", self.scales, (torch.float8_e4m3fn,))
        for name, x in (("out", self.data), ("out_scales", self.scales)):
            if not x.is_contiguous():
                raise InvalidArgument(
                    f"{name}: strides are {x.stride()} for shape {tuple(x.shape)}, must be "
                    "contiguous; allocate it with new_nvfp4_rows()"
                )
        columns = heads * head_dim // BLOCK_SIZE
        if self.first_row < 0:
            raise InvalidArgument(f"first_row: is {self.first_row}, must be at least 0; count rows")
        tiles, *atom = self.scales.shape if self.scales.ndim else (0,)
        _, *expected = blocked_shape(1, columns)
        if atom != expected or tiles * ATOM_ROWS < self.first_row + rows:
            least = blocked_shape(self.first_row + rows, columns)
            raise InvalidArgument(
                f"out_scales: shape is {tuple(self.scales.shape)}, must be {least} for "
                f"{self.first_row + rows} rows, or of more rows; allocate it with new_nvfp4_rows()"
            )
        name = "output.global_scale"
        check_dtype(name, self.global_scale, (torch.float32,))
        check_shape(name, self.global_scale, (), "one scale for the whole tensor")
        check_same_device(out=self.data, out_scales=self.scales, **{name: self.global_scale})

    def write(self, x: Tensor) -> None:
        """Quantise 16-bit ``x`` ``(rows, H, D)`` into these rows; other rows' scales are kept."""
        rows = len(x)
        data, scales = quantize_activation(x.flatten(1), self.global_scale)
        self.data.copy_(data.view(self.data.shape))
        row = torch.arange(self.first_row, self.first_row + rows, device=x.device)
        fours = scales.view(torch.uint8).unflatten(-1, (-1, ATOM_COLS))
        lines = self.scales.view(torch.uint8).unflatten(-1, (-1, ATOM_COLS))
        quarter = ATOM_ROWS // 4
        lines[row // ATOM_ROWS, :, row % quarter, row % ATOM_ROWS // quarter] = fours


def check_pair(name: str, given: tuple[Tensor, Tensor]) -> None:
    """Raise unless ``given`` is a tuple of two: data and scales."""
    if not isinstance(given, tuple) or len(given) != 2:
        raise InvalidArgument(
            f"{name}: is {type(given).__name__}, must be a pair of tensors, data and scales; "
            "allocate it with new_nvfp4_rows()"
        )


def new_nvfp4_rows(q: Tensor) -> tuple[Tensor, Tensor]:
    """Allocate data and blocked scales for ``q`` ``(T, H, D)`` in NVFP4; H·D: a multiple of 64."""
    rows, heads, head_dim = q.shape
    shape = blocked_shape(rows, heads * head_dim // BLOCK_SIZE)
    data = q.new_empty((rows, heads, head_dim // 2), dtype=torch.uint8)
    return data, q.new_empty(shape, dtype=torch.float8_e4m3fn)
