"""Fused op of a model, with the modules around it; the self-check runs it fused and unfused."""

from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from nvfp4_kernels.formats.fp8_rows import FP8_MAX
from nvfp4_kernels.formats.nvfp4 import GLOBAL_RANGE
from vllm_fp4_plugin.ops.operands import QuantizedInput, Unreduced

TOKENS = 5
_DEVIATIONS = 4  # random values of this many standard deviations reach the largest value


@dataclass(frozen=True)
class Neighbourhood:
    """Fused op of one layer.

    Attributes:
        name: name of the fusion, for messages.
        kind: key of the computation; ops with equal keys perform the same computation.
        results: function that runs the op, fused for True, unfused for False, and returns the
            results.
        separate: function that unfuses the op in the model.
    """

    name: str
    kind: Hashable
    results: Callable[[bool], Sequence[Tensor]]
    separate: Callable[[], None]


def random_input(layer: Any, tokens: int = TOKENS) -> Tensor:
    """Normally distributed input ``(tokens, K)`` of a layer.

    If the layer has a calibrated scale, values of ``_DEVIATIONS`` standard deviations reach the
    largest NVFP4 or E4M3 value under the scale.
    """
    scale = getattr(layer, "input_scale", None)
    values = torch.randn(tokens, layer.input_size, generator=_generator()).to(layer.weight.device)
    if scale is not None:
        largest = FP8_MAX if layer.weight_scale.dtype == torch.int32 else GLOBAL_RANGE
        values = values * (scale.float() * (largest / _DEVIATIONS))
    return values.to(layer.params_dtype)


def random_rows(like: Tensor, width: int, tokens: int = TOKENS, seed: int = 0) -> Tensor:
    """Normally distributed ``(tokens, width)``, with dtype and device of ``like``."""
    return torch.randn(tokens, width, generator=_generator(seed)).to(like)


def _generator(seed: int = 0) -> torch.Generator:
    return torch.Generator("cpu").manual_seed(seed)


def product(layer: Any, x: Any) -> Tensor:
    """Result of a linear layer of ours on this rank, before any all-reduce.

    For a fused gate and up projection, the result of the activation or, if that is NVFP4, of the
    layer that consumes it.
    """
    out = layer.quant_method.apply(layer, x)
    if hasattr(out, "silu_and_mul"):
        consumer, out = out.consumer, out.silu_and_mul()
        if consumer is not None:
            out = consumer.quant_method.apply(consumer, out)
    return plain(out)


def plain(out: Any) -> Tensor:
    """Tensor in a module's result: the first of a tuple, or the partial sum of an ``Unreduced``.

    Raises:
        TypeError: the result is not a tensor, e.g. a ``QuantizedInput``.
    """
    first = out[0] if isinstance(out, tuple) else out
    if isinstance(first, Unreduced):
        return first.partial
    if isinstance(first, QuantizedInput) or not isinstance(first, Tensor):
        raise TypeError(f"the result is {type(first).__name__}, must be a tensor")
    return first


def distance(fused: Sequence[Tensor], unfused: Sequence[Tensor]) -> float:
    """Largest RMS difference of a fused and an unfused result, relative to the unfused RMS.

    Infinite if a result has NaN.
    """
    furthest = 0.0
    for one, other in zip(fused, unfused, strict=True):
        size, apart = (float(x.double().norm()) for x in (other, one.double() - other.double()))
        if apart != apart or size != size:
            return float("inf")
        if apart:
            furthest = max(furthest, apart / size if size else float("inf"))
    return furthest
