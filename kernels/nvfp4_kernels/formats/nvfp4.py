"""NVFP4: number format, quantisation, dequantisation, and the tensor core's scale layout.

``value = e2m1 · e4m3 block scale · fp32 global scale``, one block scale per 16 consecutive
elements of the last dimension K. A byte has two E2M1 codes, the even element's in the low nibble.

Scales exist in two layouts:

* *linear* ``(..., rows, K/16)``: as checkpoints store them.
* *blocked* ``(..., ceil(rows/128), ceil(K/64), 32, 16)``: 512-byte atoms as ``tcgen05.cp`` and
  ``tcgen05.mma.block_scale`` read them (PTX ISA, "Scale factor layout", 4X). Row ``r`` and scale
  column ``c`` sit in atom ``(r//128, c//4)`` at ``[r%32, (r%128)//32·4 + c%4]``; padding is zero.
"""

from dataclasses import dataclass
from typing import Literal, get_args

import torch
from torch import Tensor

from nvfp4_kernels.checks import (
    InvalidArgument,
    check_blocks_of_16,
    check_dtype,
    check_shape,
)
from nvfp4_kernels.each_row import row_product

BLOCK_SIZE = 16
E2M1_MAX = 6.0
E4M3_MAX = 448.0
E4M3_TINY = 2.0**-9
GLOBAL_RANGE = E2M1_MAX * E4M3_MAX
_SMALLEST = torch.finfo(torch.float32).tiny  # smallest float32 with a finite reciprocal
# Smallest global scale of a row: times the smallest block scale, its reciprocal is still finite.
SMALLEST_ROW_SCALE = 2.0**-118

ATOM_ROWS = 128
ATOM_COLS = 4

# Meaning of a producer's global scale: "modelopt" stores the factor max|x| / 2688 and multiplies by
# it, "compressed-tensors" stores the divisor 2688 / max|x| and divides. The two round differently,
# so each producer's packing needs its own arithmetic.
Convention = Literal["modelopt", "compressed-tensors"]

E2M1_VALUES = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)

# The largest magnitude that rounds to each code but the last. Ties round to the even code: the
# midpoints .75, 1.75 and 3.5 round up, so that their bound is one ulp less.
_UPPER_BOUNDS = (
    0.25, 0.75 - 2.0**-24, 1.25, 1.75 - 2.0**-23, 2.5, 3.5 - 2.0**-22, 5.0
)  # fmt: skip

_DECODED_ELEMENTS = 1 << 24  # of a weight at a time, in a product: 64 MB of float32

_FLOAT_DTYPES = (torch.bfloat16, torch.float16, torch.float32)


@dataclass(frozen=True, eq=False)
class Nvfp4Tensor:
    """Matrix, or batch of matrices, in NVFP4.

    Attributes:
        data: uint8 ``(..., rows, K/2)``, two E2M1 codes per byte, low nibble = even k.
        scales: float8_e4m3fn, linear ``(..., rows, K/16)`` or blocked
            ``(..., ceil(rows/128), ceil(K/64), 32, 16)``.
        global_scale: float32, the factor that multiplies every value (ModelOpt's
            ``weight_scale_2``; the reciprocal of compressed-tensors' ``weight_global_scale``):
            ``()`` for the whole tensor or ``(..., rows)`` per row.
        layout: layout of ``scales``, linear or blocked.

    Raises:
        InvalidArgument: the parts' dtypes or shapes do not fit together.
    """

    data: Tensor
    scales: Tensor
    global_scale: Tensor
    layout: Literal["linear", "blocked"] = "linear"

    def __post_init__(self) -> None:
        check_dtype("data", self.data, (torch.uint8,))
        check_dtype("scales", self.scales, (torch.float8_e4m3fn,))
        check_blocks_of_16("data", self.shape)
        *batch, rows, k = self.shape
        cols = k // BLOCK_SIZE
        shape = (rows, cols) if self.layout == "linear" else blocked_shape(rows, cols)
        check_shape("scales", self.scales, (*batch, *shape), f"is their layout {self.layout}?")
        if self.global_scale.ndim:
            remedy = "or () for the whole tensor"
            check_shape("global_scale", self.global_scale, self.data.shape[:-1], remedy)

    @property
    def shape(self) -> tuple[int, ...]:
        """Logical shape ``(..., rows, K)``."""
        return (*self.data.shape[:-1], 2 * self.data.shape[-1])

    def to_blocked(self) -> "Nvfp4Tensor":
        """Convert the scales to the blocked layout, unless blocked already; the data are shared."""
        if self.layout == "blocked":
            return self
        return Nvfp4Tensor(self.data, to_blocked(self.scales), self.global_scale, "blocked")

    def to_linear(self) -> "Nvfp4Tensor":
        """Convert the scales to the linear layout, unless linear already; the data are shared."""
        if self.layout == "linear":
            return self
        rows, k = self.shape[-2:]
        scales = from_blocked(self.scales, rows, k // BLOCK_SIZE)
        return Nvfp4Tensor(self.data, scales, self.global_scale, "linear")

    def dequantize(self, dtype: torch.dtype = torch.float32) -> Tensor:
        """Dequantised values as ``dtype``, shape ``(..., rows, K)``.

        Code · block scale · global scale is computed in float32.
        """
        linear = self.to_linear()
        step = linear.scales.float() * _per_row(self.global_scale)
        return scale_blocks(decode_e2m1(self.data), step).to(dtype)


# --- E2M1 -----------------------------------------------------------------------------------


def encode_e2m1(x: Tensor) -> Tensor:
    """Round float32 ``(..., K)`` to E2M1 and pack it: uint8 ``(..., K/2)``.

    Rounds to nearest even, saturates at ±6 and keeps the sign of zero, as
    ``cvt.rn.satfinite.e2m1x2.f32`` does; NaN becomes ±6.
    """
    magnitude = x.abs()
    # Counting the bounds not exceeded is several times faster on CPU than a binary search, and
    # leaves NaN, which exceeds nothing and is below nothing, at the largest code.
    below = torch.zeros_like(x, dtype=torch.uint8)
    for bound in _UPPER_BOUNDS:
        below += magnitude <= bound
    code = (len(_UPPER_BOUNDS) - below) | (torch.signbit(x).to(torch.uint8) << 3)
    return code[..., 0::2] | (code[..., 1::2] << 4)


def decode_e2m1(data: Tensor) -> Tensor:
    """Unpack uint8 ``(..., K/2)`` to float32 ``(..., K)``."""
    # One gather of two floats per byte; an embedding lookup is the fastest such gather on CPU.
    pairs = torch.nn.functional.embedding(data.int(), _byte_values(data.device))
    return pairs.flatten(-2)


def _byte_values(device: torch.device) -> Tensor:
    """Pair of values that each of the 256 bytes stands for: float32 ``(256, 2)``."""
    magnitudes = torch.tensor(E2M1_VALUES, dtype=torch.float32, device=device)
    nibbles = torch.cat([magnitudes, -magnitudes])
    byte = torch.arange(256, device=device)
    return torch.stack([nibbles[byte % 16], nibbles[byte // 16]], dim=-1)


# --- quantising -----------------------------------------------------------------------------


def global_scale_of(x: Tensor, convention: Convention = "modelopt") -> Tensor:
    """Global scale, float32 ``()``, that maps ``max|x|`` to the largest NVFP4 value, 2688.

    The scale is a factor or a divisor, as ``convention`` stores it; 1 for an all-zero or empty
    tensor. Both the scale and its reciprocal are finite for any finite ``x``.
    """
    amax = x.abs().amax().float() if x.numel() else x.new_zeros((), dtype=torch.float32)
    amax = torch.where(amax == 0, GLOBAL_RANGE, amax)
    if convention == "modelopt":
        return _divide(amax, GLOBAL_RANGE).clamp(min=_SMALLEST)
    return (GLOBAL_RANGE / amax).clamp(max=1.0 / _SMALLEST)


def quantize_weight(
    x: Tensor,
    global_scale: Tensor | None = None,
    *,
    block_scales: Tensor | None = None,
    convention: Convention = "modelopt",
) -> Nvfp4Tensor:
    """Quantise a weight to NVFP4, bit-identical to the result of ``convention``'s producer.

    Args:
        x: bfloat16, float16 or float32 ``(..., rows, K)``, K a multiple of 16, finite.
        global_scale: float32 ``()`` as ``convention`` stores it; by default
            ``global_scale_of(x, convention)``.
        block_scales: float8_e4m3fn ``(..., rows, K/16)`` to use instead of scales that map each
            block's largest magnitude to 6 (see ``scale_search``).
        convention: ``"modelopt"`` (NVIDIA ModelOpt's ``NVFP4QTensor``) or ``"compressed-tensors"``
            (its ``nvfp4-pack-quantized`` compressor).

    Returns:
        An ``Nvfp4Tensor`` in the linear layout.

    Raises:
        InvalidArgument: K is not a multiple of 16, the dtype or ``convention`` is unsupported,
            ``x`` has NaN or infinity, or the global scale is not ``()``, positive and finite.
    """
    check_dtype("x", x, _FLOAT_DTYPES)
    check_blocks_of_16("x", x.shape)
    if convention not in get_args(Convention):
        accepted = " or ".join(get_args(Convention))
        raise InvalidArgument(f"convention: is {convention!r}, must be {accepted}")
    if not bool(torch.isfinite(x).all()):
        raise InvalidArgument(
            "x: holds NaN or infinity, must be finite; mend or exclude this tensor"
        )
    if global_scale is None:
        global_scale = global_scale_of(x, convention)
    check_shape("global_scale", global_scale, (), "one scale for the whole tensor")
    if not bool(torch.isfinite(global_scale) & (global_scale > 0)):
        raise InvalidArgument(
            f"global_scale: is {global_scale.item()}, must be positive and finite; "
            "leave it out to take that of max|x|"
        )
    if block_scales is None:
        block_scales = absmax_scales(x, global_scale, convention)
    blocks = x.unflatten(-1, (-1, BLOCK_SIZE))
    step = block_step(block_scales, global_scale, convention)
    # Adding +0 turns the negative zeros of the input into positive ones, as the producers do.
    scaled = (blocks / step.unsqueeze(-1) + 0.0).flatten(-2)
    factor = global_scale if convention == "modelopt" else global_scale.reciprocal()
    return Nvfp4Tensor(encode_e2m1(scaled), block_scales, factor)


def block_step(scales: Tensor, global_scale: Tensor, convention: Convention = "modelopt") -> Tensor:
    """Value of E2M1's 1.0 in each block: float32, shaped like ``scales``."""
    if convention == "modelopt":
        return scales.float() * global_scale
    return scales.float() / global_scale


def absmax_scales(
    x: Tensor,
    global_scale: Tensor,
    convention: Convention = "modelopt",
    largest: float = E2M1_MAX,
) -> Tensor:
    """Block scales that map the largest magnitude of each block to ``largest``.

    Returns float8_e4m3fn ``(..., K/16)``.
    """
    amax = x.unflatten(-1, (-1, BLOCK_SIZE)).abs().amax(-1).float()
    if convention == "modelopt":
        exact = amax / (largest * global_scale)
        exact = torch.where(exact == 0, 1.0, exact)
        return exact.clamp(E4M3_TINY, E4M3_MAX).to(torch.float8_e4m3fn)
    scales = (global_scale * _divide(amax, largest)).clamp(max=E4M3_MAX).to(torch.float8_e4m3fn)
    eps = torch.finfo(torch.float8_e4m3fn).eps
    return torch.where(scales.float() == 0, eps, scales.float()).to(torch.float8_e4m3fn)


def quantize_activation(
    x: Tensor, global_scale: Tensor, smallest_scale: float = 0.0
) -> tuple[Tensor, Tensor]:
    """Quantise activations as an inference engine does, at run time.

    Args:
        x: bfloat16, float16 or float32 ``(..., rows, K)``.
        global_scale: float32 ``()`` or one per row ``(..., rows)``; the factor that multiplies
            the decoded values, as ModelOpt's ``input_scale``.
        smallest_scale: lower bound, an E4M3 number, of nonzero blocks' scales; 0: no bound.

    Returns:
        ``data`` uint8 ``(..., rows, K/2)``, and ``scales`` float8_e4m3fn ``(..., rows, K/16)`` in
        the linear layout. Unlike in ``quantize_weight``, a zero block gets scale 0, and a block
        with a NaN gets a NaN scale. A block too large for the global scale saturates.
    """
    blocks = x.float().unflatten(-1, (-1, BLOCK_SIZE))
    inverse = _per_row(global_scale).reciprocal()
    amax = blocks.abs().amax(-1)
    exact = (inverse * (amax * (1.0 / E2M1_MAX))).clamp(max=E4M3_MAX)
    if smallest_scale:
        exact = torch.where(amax == 0, exact, exact.clamp(min=smallest_scale))
    scales = exact.to(torch.float8_e4m3fn)
    step = activation_step(scales, global_scale)
    # A zero scale must give zeros, not 0/0: the hardware quantiser multiplies by zero there.
    multiplier = torch.where(step == 0, 0.0, step.reciprocal())
    scaled = (blocks * multiplier.unsqueeze(-1)).flatten(-2)
    return encode_e2m1(scaled), scales


def activation_step(scales: Tensor, global_scale: Tensor) -> Tensor:
    """Value of E2M1's 1.0 in each block of an activation: float32, shaped like ``scales``."""
    return scales.float() * _per_row(global_scale).reciprocal().reciprocal()


def row_global_scales(x: Tensor) -> Tensor:
    """Global scale of each row, ``max|row| / 2688``, float32 ``(..., rows)``; 1 for a zero row.

    The scale has a lower bound, so that the reciprocal of a block's step is finite.
    """
    amax = x.abs().amax(-1).float()
    scale = _divide(amax, GLOBAL_RANGE).clamp(min=SMALLEST_ROW_SCALE)
    return torch.where(amax > 0, scale, 1.0)


def _divide(x: Tensor, by: float) -> Tensor:
    """Divide with the same rounding on all devices.

    With a Python number as divisor, CUDA would multiply by the reciprocal.
    """
    return x / x.new_tensor(by)


# --- products -------------------------------------------------------------------------------


def decode_blocks(data: Tensor, blocked_scales: Tensor) -> Tensor:
    """E2M1 value times block scale, without the global scale: float32 ``(..., rows, K)``, exact."""
    rows, k = data.shape[-2], 2 * data.shape[-1]
    scales = from_blocked(blocked_scales, rows, k // BLOCK_SIZE)
    return scale_blocks(decode_e2m1(data), scales.float())


def block_scaled_product(a: Tensor, a_scales: Tensor | None, b: Tensor, b_scales: Tensor) -> Tensor:
    """A · Bᵀ as the block-scaled MMA computes it: float32 ``(..., M, N)``, without global scales.

    Decoded operands have at most 6 (NVFP4), 8 (bfloat16) or 11 (float16) significant bits, so that
    every product is exact in float32 and only the summation order is open.

    Args:
        a: uint8 ``(..., M, K/2)``, or 16-bit floats ``(..., M, K)`` when ``a_scales`` is None.
        a_scales: float8_e4m3fn, blocked, or None.
        b: uint8 ``(..., N, K/2)``.
        b_scales: float8_e4m3fn, blocked.
    """
    return product_with_weight(
        a.float() if a_scales is None else decode_blocks(a, a_scales), b, b_scales
    )


def product_with_weight(
    a: Tensor, b: Tensor, b_scales: Tensor, batch_invariant: bool = False
) -> Tensor:
    """``block_scaled_product`` of activations ``a``, decoded to float32 ``(..., M, K)``.

    With ``batch_invariant``, each row of the result depends on the same row of ``a`` alone.
    """
    product = row_product if batch_invariant else torch.matmul
    row_tiles = max(1, _DECODED_ELEMENTS // (ATOM_ROWS * max(1, a.shape[-1])))
    out = a.new_empty((*a.shape[:-1], b.shape[-2]))
    for tile in range(0, b_scales.shape[-4], row_tiles):
        part = slice(tile * ATOM_ROWS, (tile + row_tiles) * ATOM_ROWS)
        decoded_b = decode_blocks(b[..., part, :], b_scales[..., tile : tile + row_tiles, :, :, :])
        out[..., part] = product(a, decoded_b.mT)
    return out


def scale_blocks(values: Tensor, per_block: Tensor) -> Tensor:
    """Multiply blocks of ``values`` ``(..., K)`` by factors ``per_block`` ``(..., K/16)``."""
    return (values.unflatten(-1, (-1, BLOCK_SIZE)) * per_block.unsqueeze(-1)).flatten(-2)


def _per_row(global_scale: Tensor) -> Tensor:
    """Shape a global scale so that it broadcasts over the blocks of a row."""
    return global_scale if global_scale.ndim == 0 else global_scale.unsqueeze(-1)


# --- scale layout ---------------------------------------------------------------------------


def blocked_shape(rows: int, cols: int) -> tuple[int, int, int, int]:
    """Shape of the blocked layout of ``rows × cols`` scales."""
    return (-(-rows // ATOM_ROWS), -(-cols // ATOM_COLS), ATOM_ROWS // 4, 4 * ATOM_COLS)


def to_blocked(scales: Tensor) -> Tensor:
    """Permute linear scales ``(..., rows, cols)`` into the blocked layout, padding with zeros.

    Takes any 1-byte dtype; returns ``(..., ceil(rows/128), ceil(cols/4), 32, 16)``, contiguous.
    """
    *batch, rows, cols = scales.shape
    row_tiles, col_tiles, quarter, _ = blocked_shape(rows, cols)
    raw = scales.view(torch.uint8)
    padded = raw.new_zeros(*batch, row_tiles * ATOM_ROWS, col_tiles * ATOM_COLS)
    padded[..., :rows, :cols] = raw
    # (row tile, r//32, r%32, column tile, c%4) -> (row tile, column tile, r%32, r//32, c%4)
    atoms = padded.view(*batch, row_tiles, 4, quarter, col_tiles, ATOM_COLS)
    atoms = atoms.movedim((-2, -3), (-4, -3))
    return atoms.reshape(*batch, *blocked_shape(rows, cols)).view(scales.dtype)


def from_blocked(blocked: Tensor, rows: int, cols: int) -> Tensor:
    """Undo ``to_blocked``: linear scales ``(..., rows, cols)``, padding dropped."""
    expected = blocked_shape(rows, cols)
    if tuple(blocked.shape[-4:]) != expected:
        raise InvalidArgument(
            f"blocked: shape {tuple(blocked.shape)} does not hold {rows} × {cols} scales, "
            f"must end in {expected}; make it with to_blocked()"
        )
    *batch, row_tiles, col_tiles, quarter, _ = blocked.shape
    atoms = blocked.view(torch.uint8).view(*batch, row_tiles, col_tiles, quarter, 4, ATOM_COLS)
    # (row tile, column tile, r%32, r//32, c%4) -> (row tile, r//32, r%32, column tile, c%4)
    atoms = atoms.movedim((-4, -3), (-2, -3))
    linear = atoms.reshape(*batch, row_tiles * ATOM_ROWS, col_tiles * ATOM_COLS)
    return linear[..., :rows, :cols].contiguous().view(blocked.dtype)
