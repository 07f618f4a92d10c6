"""Quantisation of layer inputs, from a checkpoint's quantization config."""

from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple

from nvfp4_kernels.formats.nvfp4 import BLOCK_SIZE
from nvfp4_kernels.formats.terms import EXACT_TERMS
from nvfp4_kernels.precompile.linear_sm100 import Activation

_ALGORITHMS = {"NVFP4": True, "W4A16_NVFP4": False}  # ModelOpt's names: are inputs quantised?
_FP4_BITS = 4


class Inputs(NamedTuple):
    """Quantisation of GEMM inputs: NVFP4 on sm_100; on sm_90, if asked for, FP8, of one term.

    Attributes:
        activation: one calibrated global scale, or one per token.
        terms: number of NVFP4 terms.
    """

    activation: Activation
    terms: int = 1


CALIBRATED = Inputs("static")
# Weight-only checkpoints are served with inputs in enough terms to lose less than 16 bits do.
OF_WEIGHTS_ALONE = Inputs("per-token", EXACT_TERMS)
# Inputs of a 16-bit checkpoint, which may be quantised at load or elsewhere: both forms.
EITHER = (CALIBRATED, Inputs("per-token"))


def quantized_inputs(quantization: Mapping[str, Any]) -> tuple[Inputs, ...]:
    """Find the input quantisation of a checkpoint's layers from ``quantization_config``.

    Args:
        quantization: config of ModelOpt, whose fields may be nested, or of compressed-tensors;
            empty for a 16-bit checkpoint.

    Returns:
        Distinct quantisations; ``EITHER`` if no layer of the config is NVFP4.
    """
    found = {
        CALIBRATED if quantizes else OF_WEIGHTS_ALONE
        for quantizes in _quantize_inputs(quantization)
    }
    return tuple(sorted(found, key=lambda inputs: inputs.terms)) or EITHER


def _quantize_inputs(quantization: Mapping[str, Any]) -> Iterator[bool]:
    """Yield, for each kind of NVFP4 layer in the config, whether its inputs are quantised."""
    for part in (quantization, quantization.get("quantization")):
        if not isinstance(part, Mapping):
            continue
        groups = _objects(part.get("config_groups"))
        layers = [part, *_objects(part.get("quantized_layers"))]
        fp4 = [g for g in groups if _is_fp4(g.get("weights"))]
        if fp4:
            yield from (_is_fp4(g.get("input_activations")) for g in fp4)
        elif not groups:
            algorithms = {str(layer.get("quant_algo")).upper() for layer in layers}
            yield from (_ALGORITHMS[name] for name in algorithms & _ALGORITHMS.keys())


def _objects(several: object) -> list[Mapping[str, Any]]:
    each = several.values() if isinstance(several, Mapping) else ()
    return [one for one in each if isinstance(one, Mapping)]


def _is_fp4(scheme: object) -> bool:
    if not isinstance(scheme, Mapping):
        return False
    return (
        scheme.get("num_bits") == _FP4_BITS and scheme.get("group_size", BLOCK_SIZE) == BLOCK_SIZE
    )
