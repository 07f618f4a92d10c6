"""Quantiser of weights in slices of rows: peak memory stays near the size of one weight."""

import math
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from nvfp4_kernels.checks import InvalidArgument
from nvfp4_kernels.formats.nvfp4 import (
    BLOCK_SIZE,
    GLOBAL_RANGE,
    Convention,
    Nvfp4Tensor,
    global_scale_of,
)
from nvfp4_kernels.formats.scale_search import ScaleRule, quantize_with_rule
from vllm_fp4_plugin.formats import UnsupportedCheckpoint
from vllm_fp4_plugin.kernel_weight import MAX_GLOBAL, MIN_GLOBAL, Loss, are_globals, loss
from vllm_fp4_plugin.quantizer.errors import QuantizerError
from vllm_fp4_plugin.quantizer.source import Source
from vllm_fp4_plugin.quantizer.stored import StoredWeight, ignoring

# Slices fit the caches, and leave no large holes in the allocator, which would raise peak memory.
_SLICE_ELEMENTS = 1 << 18


@dataclass(frozen=True)
class QuantizedWeight:
    """A weight in NVFP4.

    Attributes:
        data: uint8 ``(rows, K/2)``.
        scales: float8_e4m3fn ``(rows, K/16)``.
        global_scale: float32 ``()``, factor or divisor by convention.
        relative_mse: ``‖dequantised - original‖² / ‖original‖²``.
    """

    data: Tensor
    scales: Tensor
    global_scale: Tensor
    relative_mse: float


class WeightQuantizer:
    """Quantiser of the weights of a checkpoint's linears.

    Args:
        source: the checkpoint.
        weights: locations of the linears' weights.
        convention: format to write, by which global scales are factors or divisors.
        rule: rule for block scales.
        sharing: for each linear, all linears with the same global scale, itself included; the
            largest of their weights sets the scale. A linear that is absent has its own scale.
        fused: for each linear, all linears that engines fuse into one matrix, itself included. An
            all-zero linear gets the scale of the largest weight of these, as some engines apply one
            scale to all.
    """

    def __init__(
        self,
        source: Source,
        weights: Mapping[str, StoredWeight],
        convention: Convention,
        rule: ScaleRule,
        sharing: Mapping[str, Sequence[str]],
        fused: Mapping[str, Sequence[str]],
    ):
        self._source = source
        self._weights = weights
        self._convention = convention
        self._rule = rule
        self._sharing = sharing
        self._fused = fused
        # Floats, not tensors: small tensors that live on, between large freed ones, fragment the
        # heap.
        self._known_amax: dict[str, float] = {}

    def quantize(self, name: str) -> QuantizedWeight:
        """Quantise the weight of the linear ``name``.

        Raises:
            QuantizerError: the message names a weight with NaN or infinity, or with values that
                NVFP4 cannot represent.
        """
        amax = self._shared_amax(name)
        scale = self._global_scale(name, amax)
        weight = self._weights[name].load(self._source)
        rows, k = weight.shape
        data = torch.empty(rows, k // 2, dtype=torch.uint8)
        scales = torch.empty(rows, k // BLOCK_SIZE, dtype=torch.float8_e4m3fn)
        total, start = Loss(), 0
        for part in _slices(weight):
            stop = start + len(part)
            packed = self._packed(name, part, scale)
            data[start:stop] = packed.data
            scales[start:stop] = packed.scales
            total = total.plus(loss(part, packed))
            start = stop
        remedy = self._remedy(name, "that outlier")
        if self._amax(name) < amax:
            remedy = "quantise without a shared scale"
        try:
            total.check(f"{name}.weight", amax, remedy)
        except UnsupportedCheckpoint as refused:
            raise QuantizerError(str(refused)) from refused
        return QuantizedWeight(data, scales, scale, total.error / total.norm if total.norm else 0.0)

    def estimated_seconds(self) -> float:
        """Estimate the seconds for all weights on this machine, from a part of the first weight.

        Raises:
            QuantizerError: see ``quantize``.
        """
        name = next(iter(self._weights))
        scale = self._global_scale(name, self._shared_amax(name))
        part = _slices(self._weights[name].load(self._source))[0]
        taken = []
        for _ in range(2):  # the first run includes reading and allocation
            start = time.monotonic()
            self._packed(name, part, scale)
            taken.append(time.monotonic() - start)
        elements = sum(math.prod(weight.shape) for weight in self._weights.values())
        return min(taken) * elements / part.numel()

    def _shared_amax(self, name: str) -> float:
        """Largest magnitude of the weights that share the global scale of ``name``.

        If these are all zero: of the weights fused with ``name``.
        """
        amax = max(self._amax(n) for n in self._sharing.get(name, [name]))
        return amax or max(self._amax(n) for n in self._fused[name])

    def _global_scale(self, name: str, amax: float) -> Tensor:
        scale = global_scale_of(torch.tensor(amax), self._convention)
        if not are_globals(scale):
            smallest, largest = (bound * GLOBAL_RANGE for bound in (MIN_GLOBAL, MAX_GLOBAL))
            raise QuantizerError(
                f"{name}.weight: its largest weight is {amax:.1e}, must be 0 or between "
                f"{smallest:.1e} and {largest:.1e}; {self._remedy(name, 'it')}"
            )
        return scale

    def _remedy(self, name: str, fault: str) -> str:
        """Advice for a weight that cannot be quantised; ``fault`` names the part to mend."""
        file = self._source.shards[self._weights[name].tensor].name
        return f"mend {fault} in {file}, or leave it as it is with {ignoring(self._fused[name])}"

    def _packed(self, name: str, part: Tensor, scale: Tensor) -> Nvfp4Tensor:
        try:
            return quantize_with_rule(
                part, self._rule, global_scale=scale, convention=self._convention
            )
        except InvalidArgument as invalid:
            raise QuantizerError(f"{name}.weight: {invalid}") from invalid

    def _amax(self, name: str) -> float:
        if name not in self._known_amax:
            weight = self._weights[name].load(self._source)
            amax = torch.stack([part.abs().amax() for part in _slices(weight)]).amax().float()
            if not torch.isfinite(amax):
                raise QuantizerError(
                    f"{name}.weight: holds NaN or infinity, must be finite; "
                    f"{self._remedy(name, 'it')}"
                )
            self._known_amax[name] = amax.item()
        return self._known_amax[name]


def _slices(weight: Tensor) -> tuple[Tensor, ...]:
    return weight.split(max(1, _SLICE_ELEMENTS // weight.shape[1]))
