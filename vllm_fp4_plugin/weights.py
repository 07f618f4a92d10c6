"""Checkpoint tensors to kernel tensors: pure functions, run once per layer at load."""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from nvfp4_kernels.nvfp4 import Nvfp4Tensor, to_blocked
from vllm_fp4_plugin.checkpoint_format import UnsupportedCheckpoint


@dataclass(frozen=True)
class KernelWeight:
    """A linear layer's weight as the kernels take it.

    Attributes:
        data: uint8 ``(N, K/2)``; ``(2, I, K/2)`` for a fused gate and up projection.
        scales: float8_e4m3fn in the blocked layout, ``(2, …)`` when fused.
        alpha: float32 ``(S,)``, what multiplies the accumulator of each shard.
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
) -> KernelWeight:
    """Permute scales into the blocked layout and fold the global scales into one alpha per shard.

    Args:
        data: uint8 ``(N, K/2)``, kept as it is.
        scales: float8_e4m3fn ``(N, K/16)``, linear.
        weight_global: float32 ``(S,)``, factors, one per shard.
        input_global: float32 ``(S,)``, factors, or None. Shards share their input, so one scale
            serves them all; the largest saturates nothing that any of them was calibrated for.
        gate_up: N holds a gate and an up projection of equal size to be run as one op.
    """
    input_scale = None if input_global is None else input_global.max()
    alpha = weight_global if input_scale is None else weight_global * input_scale
    if gate_up:
        data = data.unflatten(0, (2, -1))
        scales = scales.view(torch.uint8).unflatten(0, (2, -1)).view(torch.float8_e4m3fn)
    return KernelWeight(data, to_blocked(scales), alpha.clone(), input_scale)


def join_shards(shards: Sequence[Nvfp4Tensor]) -> tuple[Tensor, Tensor, Tensor]:
    """Stack the shards of a fused layer: data ``(N, K/2)``, linear scales, globals ``(S,)``."""
    data = torch.cat([s.data for s in shards])
    scales = torch.cat([s.scales.view(torch.uint8) for s in shards]).view(torch.float8_e4m3fn)
    return data, scales, torch.stack([s.global_scale for s in shards])


def check_globals(layer: str, tensor: str, values: Tensor) -> None:
    """Raise unless every global scale is positive and finite."""
    if not bool((torch.isfinite(values) & (values > 0)).all()):
        raise UnsupportedCheckpoint(
            f"{layer}.{tensor}: holds {values.tolist()}, global scales must be positive and "
            "finite; the checkpoint is damaged or was not calibrated, quantise it again"
        )


def check_block_scales(layer: str, tensor: str, scales: Tensor, data: Tensor) -> None:
    """Raise on NaN or negative block scales, and on zero ones over blocks that are not zero."""
    values = scales.float()
    faults = {"NaN": torch.isnan(values), "negative": values < 0}
    zero = values == 0
    if bool(zero.any()):
        # Codes 0 and 8 are ±0: a byte of zeros has none of the magnitude bits set.
        occupied = (data.unflatten(-1, (-1, 8)) & 0x77).amax(-1) > 0
        faults["zero (over values that are not)"] = zero & occupied
    for kind, where in faults.items():
        if bool(where.any()):
            row, column = where.nonzero()[0].tolist()
            raise UnsupportedCheckpoint(
                f"{layer}.{tensor}: {int(where.sum())} block scales are {kind}, the first at row "
                f"{row}, block {column}; block scales must be positive, quantise the model again"
            )
