"""Conversion of a checkpoint's tensors to those of a quantised copy."""

import math
from collections import defaultdict
from collections.abc import Callable, Mapping
from pathlib import Path

from torch import Tensor

from vllm_fp4_plugin.formats import Format
from vllm_fp4_plugin.quantizer.calibration import Ranges
from vllm_fp4_plugin.quantizer.source import Source
from vllm_fp4_plugin.quantizer.stored import StoredWeight
from vllm_fp4_plugin.quantizer.tensor_file import TensorSpec, TensorWriter
from vllm_fp4_plugin.quantizer.tensors import (
    kv_tensors,
    linear_specs,
    linear_tensors,
    scalar_spec,
)
from vllm_fp4_plugin.quantizer.weights import WeightQuantizer


class Conversion:
    """Plan and writer of all tensors of the quantised copy.

    Args:
        source: checkpoint to quantise.
        linears: locations of the weights to quantise, by linear.
        target: format of the copy.
        quantizer: quantiser of the weights.
        ranges: maxima from calibration; None: the copy is weight-only.
    """

    def __init__(
        self,
        source: Source,
        linears: Mapping[str, StoredWeight],
        target: Format,
        quantizer: WeightQuantizer,
        ranges: Ranges | None,
    ):
        self._source = source
        self._weights = linears
        self._linears: dict[str, list[str]] = defaultdict(list)  # by source tensor
        for name, weight in linears.items():
            self._linears[weight.tensor].append(name)
        self._target = target
        self._quantizer = quantizer
        self._inputs: dict[str, Tensor] = {}
        self._kv_tensors: dict[str, Tensor] = {}
        if ranges is not None:
            self._inputs = ranges.inputs
            for name in ranges.keys:
                self._kv_tensors |= kv_tensors(target, name, ranges.keys[name], ranges.values[name])
        self._specs = self._plan()

    @property
    def nbytes(self) -> int:
        """Bytes of all tensors to be written."""
        return sum(spec.nbytes for spec in self._specs.values())

    @property
    def bits_per_weight(self) -> float:
        """Mean bits per weight of the quantised linears, all scales in the copy included."""
        specs = self._source.specs
        kept = sum(spec.nbytes for name, spec in specs.items() if name not in self._linears)
        weights = sum(math.prod(weight.shape) for weight in self._weights.values())
        return 8 * (self.nbytes - kept) / weights

    def write(
        self, folder: Path, max_shard_bytes: int, on_tensor: Callable[[], None]
    ) -> dict[str, float]:
        """Write all tensors into ``folder``.

        Args:
            folder: folder of the copy.
            max_shard_bytes: see ``TensorWriter``.
            on_tensor: called after each source tensor, for a progress bar.

        Returns:
            Relative mean squared error of every quantised weight, by linear.
        """
        writer = TensorWriter(folder, self._specs, max_shard_bytes)
        errors = {}
        for name in self._source.specs:
            if name not in self._linears:
                writer.write(name, self._source.load(name))
            for linear in self._linears.get(name, ()):
                quantized = self._quantizer.quantize(linear)
                errors[linear] = quantized.relative_mse
                amax = self._inputs.get(linear)
                for part, tensor in linear_tensors(self._target, linear, quantized, amax):
                    writer.write(part, tensor)
            on_tensor()
        for name, tensor in self._kv_tensors.items():
            writer.write(name, tensor)
        writer.finish()
        return errors

    def _plan(self) -> dict[str, TensorSpec]:
        specs: dict[str, TensorSpec] = {}
        for name, spec in self._source.specs.items():
            if name not in self._linears:
                specs[name] = spec
            for linear in self._linears.get(name, ()):
                shape = self._weights[linear].shape
                specs |= linear_specs(self._target, linear, shape, linear in self._inputs)
        return specs | dict.fromkeys(self._kv_tensors, scalar_spec(self._target))
