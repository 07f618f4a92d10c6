"""Conversion of a checkpoint's tensors to those of its quantised copy."""

import math
from collections.abc import Callable, Sequence
from pathlib import Path

from torch import Tensor

from vllm_fp4_plugin.formats import Format
from vllm_fp4_plugin.quantizer.calibration import Ranges
from vllm_fp4_plugin.quantizer.source import Source
from vllm_fp4_plugin.quantizer.tensor_file import TensorSpec, TensorWriter
from vllm_fp4_plugin.quantizer.tensors import (
    kv_tensors,
    linear_specs,
    linear_tensors,
    scalar_spec,
)
from vllm_fp4_plugin.quantizer.weights import WeightQuantizer


class Conversion:
    """Plan of all that will be written, and its writing, tensor by tensor.

    Without ``ranges`` the copy is weight-only.
    """

    def __init__(
        self,
        source: Source,
        linears: Sequence[str],
        target: Format,
        quantizer: WeightQuantizer,
        ranges: Ranges | None,
    ):
        self._source = source
        self._linears = {f"{name}.weight": name for name in linears}
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
        """Bits that one weight of a quantised linear takes, scales included."""
        specs = self._source.specs
        kept = sum(spec.nbytes for name, spec in specs.items() if name not in self._linears)
        weights = sum(math.prod(specs[name].shape) for name in self._linears)
        return 8 * (self.nbytes - kept) / weights

    def write(
        self, folder: Path, max_shard_bytes: int, on_tensor: Callable[[], None]
    ) -> list[float]:
        """Write all tensors into ``folder``; ``on_tensor`` is called for each one of the source.

        Returns:
            The relative mean squared error of every quantised weight.
        """
        writer = TensorWriter(folder, self._specs, max_shard_bytes)
        errors = []
        for name in self._source.specs:
            linear = self._linears.get(name)
            if linear is None:
                writer.write(name, self._source.load(name))
            else:
                quantized = self._quantizer.quantize(linear)
                errors.append(quantized.relative_mse)
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
            linear = self._linears.get(name)
            if linear is None:
                specs[name] = spec
            else:
                specs |= linear_specs(self._target, linear, spec.shape, linear in self._inputs)
        return specs | dict.fromkeys(self._kv_tensors, scalar_spec(self._target))
