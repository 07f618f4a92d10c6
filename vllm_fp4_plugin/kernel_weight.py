"""Conversion and checks of checkpoint tensors: pure functions, run once per layer."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn import functional

from nvfp4_kernels.dispatch import WeightLayout
from nvfp4_kernels.formats.folded import decode_folded, folded_shapes
from nvfp4_kernels.formats.fragments import decode_fragments, fragment_shapes, to_fragments
from nvfp4_kernels.formats.nvfp4 import (
    BLOCK_SIZE,
    GLOBAL_RANGE,
    Nvfp4Tensor,
    blocked_shape,
    decode_blocks,
    to_blocked,
)
from vllm_fp4_plugin.formats import UnsupportedCheckpoint

# Bounds of global scales: far outside the range of real weights and activations, and such that the
# product of two scales is still a normal float32.
MIN_GLOBAL, MAX_GLOBAL = 2.0**-60, 2.0**60

# Relative squared error of a block that no normal E4M3 scale can cause: with a normal scale the
# error is at most .037, for 15 elements between 4 and 6 units.
_COARSE = 0.04
# E4M3 bits of the largest scale of a coarse block: the largest subnormal number, 7, plus the six
# codes above that a scale search tries.
_LARGEST_COARSE_CODE = 13
# Global scales from here on may round a 16-bit block's scale to float32's zero, the scale of an
# all-zero block: 2^-133, the smallest number, is less than 2^-149 of such a global scale.
_HIDES_SMALL = 2.0**13
_CHECKED_ELEMENTS = 1 << 22  # per chunk, in float64

# Rows of a tensor map are multiples of 16 bytes: otherwise a kernel would pad the weight at every
# call.
_ROW_BYTES = 16


@dataclass(frozen=True)
class KernelWeight:
    """Weight of a linear layer in the layout of the layer's kernel.

    Attributes:
        data: uint8 ``(N, K/2)``, K perhaps padded, or uint8 in fragment or folded layout;
            ``(2, …)`` for a fused gate and up projection.
        scales: float8_e4m3fn in the blocked layout, uint8 in fragment layout, or int32 in folded
            layout; ``(2, …)`` when fused.
        alpha: float32 ``(S,)``, factor of each shard's accumulator; of a folded weight ``(N,)``, of
            each row, ``(2, N/2)`` when fused.
        input_scale: float32 ``()``, None unless activations have a calibrated scale.
    """

    data: Tensor
    scales: Tensor
    alpha: Tensor
    input_scale: Tensor | None


def kernel_weight(
    data: Tensor,
    scales: Tensor,
    weight_global: Tensor,
    input_global: Tensor | None,
    *,
    gate_up: bool,
    layout: WeightLayout,
    padded: bool = False,
) -> KernelWeight:
    """Convert a weight to the kernel's layout and fold the global scales into an alpha per shard.

    Args:
        data: uint8 ``(N, K/2)``, two E2M1 codes per byte.
        scales: float8_e4m3fn ``(N, K/16)``, linear layout.
        weight_global: float32 ``(S,)``, global scales of the shards, as factors.
        input_global: float32 ``(S,)``, input scales of the shards, as factors, or None. The shards
            share their input, and so one scale: the largest, which saturates no calibrated value.
        gate_up: whether the rows are a gate and an up projection of equal size, to run as one op.
        layout: weight layout of the kernel, blocked or fragments; see ``folded_weight`` for the
            third.
        padded: whether, in the blocked layout, to pad K with zeros to a multiple of 32.
    """
    input_scale = None if input_global is None else input_global.max()
    alpha = weight_global if input_scale is None else weight_global * input_scale
    if gate_up:
        data = data.unflatten(0, (2, -1))
        scales = scales.view(torch.uint8).unflatten(0, (2, -1)).view(torch.float8_e4m3fn)
    if layout == "blocked":
        if padded and data.shape[-1] % _ROW_BYTES:
            data = functional.pad(data, (0, -data.shape[-1] % _ROW_BYTES))
        return KernelWeight(data, to_blocked(scales), alpha.clone(), input_scale)
    packed = to_fragments(data, scales)
    return KernelWeight(packed.data, packed.scales, alpha.clone(), input_scale)


def weight_bytes(n: int, k: int, layout: WeightLayout, *, padded: bool = False) -> int:
    """Bytes of data and block scales of a weight ``(n, k)``, padding included.

    ``layout``, ``padded``: as for ``kernel_weight``.
    """
    if layout == "fragments":
        return sum(torch.Size(shape).numel() for shape in fragment_shapes(n, k))
    if layout == "folded":
        data, scales = (torch.Size(shape).numel() for shape in folded_shapes(n, k))
        return data + 4 * scales
    row = k // 2 + (-(k // 2) % _ROW_BYTES if padded else 0)
    return n * row + torch.Size(blocked_shape(n, k // BLOCK_SIZE)).numel()


def decode(data: Tensor, scales: Tensor, n: int, k: int) -> Tensor:
    """Decode a weight in any layout, without factors of shards or rows: float32 ``(n, k)``."""
    if scales.dtype == torch.int32:
        return decode_folded(data, scales, n, k)
    if scales.dtype == torch.uint8:
        return decode_fragments(data, scales, n, k)
    return decode_blocks(data[..., : k // 2], scales)


def join_shards(shards: Sequence[Nvfp4Tensor]) -> tuple[Tensor, Tensor, Tensor]:
    """Stack a fused layer's shards: data, block scales in linear layout, global scales ``(S,)``."""
    data = torch.cat([s.data for s in shards])
    scales = torch.cat([s.scales.view(torch.uint8) for s in shards]).view(torch.float8_e4m3fn)
    return data, scales, torch.stack([s.global_scale for s in shards])


def are_globals(values: Tensor) -> bool:
    """Whether every global scale, factor or divisor, is in the valid range."""
    return bool(((values >= MIN_GLOBAL) & (values <= MAX_GLOBAL)).all())  # false for NaN


def check_globals(name: object, values: Tensor) -> None:
    """Raise unless every global scale, factor or divisor, is in the valid range.

    Args:
        name: file and name of the tensor, or an object that prints them.
        values: the scales.
    """
    if not are_globals(values):
        raise UnsupportedCheckpoint(
            f"{name}: holds {values.tolist()}, global scales must be positive, between "
            f"{MIN_GLOBAL:.0e} and {MAX_GLOBAL:.0e}; the checkpoint is damaged or was not "
            "calibrated, quantise it again, without layers whose weights are all nearly zero"
        )


class Loss(NamedTuple):
    """Error of a weight in NVFP4, and number of blocks too small for the weight's global scale.

    Attributes:
        error: sum of the squared errors of the elements.
        norm: sum of the squared elements.
        coarse: number of blocks with an error that only a subnormal or zero block scale can cause.
        occupied: number of blocks with an element other than zero.
    """

    error: float = 0.0
    norm: float = 0.0
    coarse: int = 0
    occupied: int = 0

    def plus(self, other: "Loss") -> "Loss":
        """Sum of two losses."""
        return Loss(
            self.error + other.error,
            self.norm + other.norm,
            self.coarse + other.coarse,
            self.occupied + other.occupied,
        )

    def check(self, name: object, amax: float, remedy: str) -> None:
        """Raise if most occupied blocks are coarse; the message ends with ``remedy``.

        Raises:
            UnsupportedCheckpoint: the message names the weight (``name``) and ``amax``, the largest
                magnitude, from which the weight's global scale was computed.
        """
        if 2 * self.coarse > self.occupied:
            raise UnsupportedCheckpoint(
                f"{name}: {self.coarse} of its {self.occupied} blocks of {BLOCK_SIZE} weights are "
                f"too small for NVFP4 beside the largest of its global scale, {amax:.1e}; {remedy}"
            )


def loss(weight: Tensor, quantised: Nvfp4Tensor) -> Loss:
    """Compute, in float64, the loss of a weight ``(N, K)`` in NVFP4.

    Args:
        weight: the exact weight.
        quantised: the weight in NVFP4, block scales in linear layout, global scale as a factor.
    """
    total = Loss()
    rows = max(1, _CHECKED_ELEMENTS // max(1, weight.shape[-1]))
    parts = (weight, quantised.data, quantised.scales)
    for values, data, scales in zip(*(part.split(rows) for part in parts), strict=True):
        exact = values.double().unflatten(-1, (-1, BLOCK_SIZE))
        rounded = Nvfp4Tensor(data, scales, quantised.global_scale).dequantize().view(exact.shape)
        norms, errors = exact.square().sum(-1), (rounded - exact).square().sum(-1)
        coarse, occupied = (errors > _COARSE * norms).sum(), (norms > 0).sum()
        part = Loss(float(errors.sum()), float(norms.sum()), int(coarse), int(occupied))
        total = total.plus(part)
    return total


def check_loss(name: object, weight: Tensor, quantised: Nvfp4Tensor, remedy: str) -> None:
    """Raise if most occupied blocks of a weight ``(N, K)`` are coarse; see ``Loss``.

    The weight's global scale is a factor, the largest magnitude divided by 2688. ``name`` and
    ``remedy`` are for the message.

    Raises:
        UnsupportedCheckpoint: see ``Loss.check``.
    """
    has_small = (quantised.scales.view(torch.uint8) <= _LARGEST_COARSE_CODE).any()
    if bool(has_small | (quantised.global_scale >= _HIDES_SMALL)):
        amax = float(quantised.global_scale) * GLOBAL_RANGE
        loss(weight, quantised).check(name, amax, remedy)


def check_row_scaled(name: object, global_scale: Tensor, k: int) -> None:
    """Raise if sums of ``k`` products can overflow float32 before the per-token scale is applied.

    ``global_scale``: the weight's, a factor.

    Raises:
        UnsupportedCheckpoint: the message names the weight and its largest magnitude.
    """
    largest = torch.finfo(torch.float32).max / (k * GLOBAL_RANGE)
    amax = float(global_scale) * GLOBAL_RANGE
    if amax > largest:
        raise UnsupportedCheckpoint(
            f"{name}: its largest weight is {amax:.1e}, must be at most {largest:.1e} for inputs "
            'with a scale per token; serve with nvfp4_tc.activation "16-bit", or leave the layer '
            "unquantised with nvfp4_tc.ignore"
        )


def are_block_scales(scales: Tensor, data: Tensor) -> bool:
    """Whether block scales are positive, or zero for blocks of zeros; False for NaN.

    Args:
        scales: float8_e4m3fn ``(..., K/16)``.
        data: uint8 ``(..., K/2)``.
    """
    raw = scales.view(torch.uint8)
    magnitude = raw & 0x7F
    zero = magnitude == 0
    wrong, some_zero = torch.stack(
        [((magnitude == 0x7F) | (raw > 0x80)).any(), zero.any()]
    ).tolist()
    return not wrong and not (some_zero and bool((zero & _occupied(data)).any()))


def _occupied(data: Tensor) -> Tensor:
    """Whether each block has an element other than zero: bool ``(..., K/16)``."""
    # Codes 0 and 8 are ±0: a byte of zeros has none of the magnitude bits set.
    return (data.unflatten(-1, (-1, BLOCK_SIZE // 2)) & 0x77).amax(-1) > 0


def check_block_scales(name: object, scales: Tensor, data: Tensor) -> None:
    """Raise on NaN or negative block scales, and on zero scales of blocks with other values.

    Args:
        name: file and name of the scales, or an object that prints them.
        scales: float8_e4m3fn ``(N, K/16)``.
        data: uint8 ``(N, K/2)``.
    """
    if are_block_scales(scales, data):
        return
    values = scales.float()
    faults = {
        "NaN": torch.isnan(values),
        "negative": values < 0,
        "zero (over values that are not)": (values == 0) & _occupied(data),
    }
    for kind, where in faults.items():
        if bool(where.any()):
            row, column = where.nonzero()[0].tolist()
            raise UnsupportedCheckpoint(
                f"{name}: {int(where.sum())} block scales are {kind}, the first at row "
                f"{row}, block {column}; block scales must be positive, quantise the model again"
            )
