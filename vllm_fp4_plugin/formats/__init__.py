"""NVFP4 checkpoint formats, one module each: reader and writer of the format's config.

=============================  ========================  =========================
format                         ``modelopt``              ``compressed-tensors``
=============================  ========================  =========================
parser and writer              ``formats/modelopt.py``   ``compressed_tensors.py``
codes u8 ``(N, K/2)``          ``weight``                ``weight_packed``
block scales ``(N, K/16)``     ``weight_scale``          ``weight_scale``
weight's global scale, f32     ``weight_scale_2``        ``weight_global_scale``
input's global scale, f32      ``input_scale``           ``input_global_scale``
global scales are              factors, amax/2688 ``()``  divisors, 2688/amax ``(1,)``
=============================  ========================  =========================

A mixed-precision checkpoint also has layers of other schemes; in both formats their tensors are
``weight`` (``weight_packed`` for MXFP4), ``weight_scale`` and, for static FP8, ``input_scale``.
Scales of FP8 blocks may be called ``weight_scale_inv`` instead, in both formats: in layers that an
exporter copied from a DeepSeek-like FP8 checkpoint.
"""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from nvfp4_kernels.formats.nvfp4 import Convention
from vllm_fp4_plugin.formats.compressed_tensors import CompressedTensors
from vllm_fp4_plugin.formats.fields import read_object
from vllm_fp4_plugin.formats.format import (
    INVERSE_SCALE,
    SCALE,
    CheckpointConfig,
    Format,
    LayerGroup,
    TensorNames,
    UnsupportedCheckpoint,
)
from vllm_fp4_plugin.formats.modelopt import LEGACY_FILE, ModelOpt

__all__ = [
    "FORMATS",
    "INVERSE_SCALE",
    "SCALE",
    "CheckpointConfig",
    "Format",
    "LayerGroup",
    "TensorNames",
    "UnsupportedCheckpoint",
    "is_nvfp4",
    "parse",
    "parse_beside",
]

FORMATS: dict[Convention, Format] = {each.name: each for each in (ModelOpt(), CompressedTensors())}


def is_nvfp4(config: Mapping[str, Any]) -> bool:
    """Whether a quantization config claims an NVFP4 format; such a config may still be refused."""
    return any(each.wrote(config) and each.claims_nvfp4(config) for each in FORMATS.values())


def parse_beside(directory: Path) -> CheckpointConfig | None:
    """Read ``hf_quant_config.json`` next to ``config.json``; None if there is no such file.

    In older mixed-precision exports by ModelOpt only this file lists the scheme of each layer.

    Raises:
        UnsupportedCheckpoint: see ``parse``; also if the file holds no JSON object.
    """
    file = directory / LEGACY_FILE
    if not file.is_file():
        return None
    try:
        config = json.loads(file.read_text(encoding="utf-8"))
    except ValueError as error:
        raise UnsupportedCheckpoint(
            f"{file}: is no JSON ({error}); copy or download the checkpoint again"
        ) from error
    return parse({"quant_method": "modelopt"} | dict(read_object(LEGACY_FILE, config)))


def parse(config: Mapping[str, Any]) -> CheckpointConfig:
    """Read a quantization config.

    Raises:
        UnsupportedCheckpoint: the message names the field, its value, accepted values and the
            remedy.
    """
    for each in FORMATS.values():
        if each.wrote(config):
            found = each.parse(config)
            found.check_patterns()
            return found
    raise UnsupportedCheckpoint(
        f"quant_method: is {config.get('quant_method')!r}, nvfp4-tc reads 'modelopt' and "
        "'compressed-tensors' NVFP4 checkpoints and unquantised ones; "
        "leave --quantization out to let vLLM choose"
    )
