"""Bit-for-bit comparison with producers of NVFP4 checkpoints and vLLM's reference quantiser."""

import itertools

import numpy as np
import pytest
import torch
from compressed_tensors.compressors.nvfp4.base import NVFP4PackedCompressor
from compressed_tensors.quantization import QuantizationScheme
from compressed_tensors.quantization.quant_scheme import NVFP4
from compressed_tensors.quantization.utils import calculate_qparams, generate_gparam
from safetensors import safe_open
from safetensors.torch import load_file
from torch import Tensor

from nvfp4_kernels.formats.nvfp4 import (
    Nvfp4Tensor,
    global_scale_of,
    quantize_activation,
    quantize_weight,
    row_global_scales,
)
from tests.test_kernels import oracle
from tests.test_kernels.producer_inputs import DTYPES, producer_inputs
from tests.test_kernels.vectors.freeze_modelopt import VECTORS, quantize_with_modelopt
from tests.test_kernels.vllm_reference import quantize_with_vllm

INPUTS = {
    f"{str(dtype).removeprefix('torch.')} {name}": x
    for dtype in DTYPES
    for name, x in producer_inputs(dtype).items()
}
EVERY_INPUT = pytest.mark.parametrize("x", INPUTS.values(), ids=INPUTS)


def assert_same_bytes(ours: Tensor, theirs: Tensor) -> None:
    assert ours.dtype == theirs.dtype
    assert ours.shape == theirs.shape
    assert torch.equal(ours.contiguous().view(torch.uint8), theirs.contiguous().view(torch.uint8))


def assert_same_packing(ours: Nvfp4Tensor, theirs: dict[str, Tensor]) -> None:
    assert torch.equal(ours.global_scale, theirs["global_scale"])
    assert_same_bytes(ours.scales, theirs["scales"])
    assert_same_bytes(ours.data, theirs["data"])


# --- NVIDIA ModelOpt --------------------------------------------------------------------------


@pytest.mark.parametrize("key", INPUTS)
def test_frozen_modelopt(key: str) -> None:
    frozen = load_file(VECTORS)
    assert_same_packing(
        quantize_weight(frozen[f"{key}/x"]),
        {part: frozen[f"{key}/{part}"] for part in ("data", "scales", "global_scale")},
    )


def test_frozen_modelopt_is_complete() -> None:
    with safe_open(VECTORS, "pt") as file:
        assert {key.rpartition("/")[0] for key in file.keys()} == set(INPUTS)  # noqa: SIM118
        assert file.metadata()["nvidia-modelopt"] == "0.47.0"


def test_installed_modelopt() -> None:
    """Compare with ModelOpt itself, in an environment with nvidia-modelopt and requests."""
    pytest.importorskip("modelopt.torch.quantization.qtensor.nvfp4_tensor", exc_type=ImportError)
    for dtype, seed in itertools.product(DTYPES, range(20)):
        for x in producer_inputs(dtype, seed).values():
            assert_same_packing(quantize_weight(x), quantize_with_modelopt(x))
    experts = torch.randn(3, 4, 48)
    assert_same_packing(quantize_weight(experts), quantize_with_modelopt(experts))


# --- compressed-tensors -----------------------------------------------------------------------


def quantize_with_compressed_tensors(x: Tensor) -> dict[str, Tensor]:
    """Packed weight, block scales and divisor, from float32 minima and maxima."""
    scheme = QuantizationScheme(targets=["Linear"], **NVFP4)
    blocks = x.float().unflatten(-1, (-1, 16))
    divisor = generate_gparam(blocks.amin(), blocks.amax())
    scales, _ = calculate_qparams(
        blocks.amin(-1), blocks.amax(-1), scheme.weights, global_scale=divisor
    )
    weights = {"weight": x, "weight_scale": scales, "weight_global_scale": divisor}
    # The library asks to compile its rounding function, which takes seconds and changes nothing.
    with torch.compiler.set_stance("force_eager"):
        packed = NVFP4PackedCompressor.compress(weights, scheme)
    return {
        "data": packed["weight_packed"],
        "scales": packed["weight_scale"],
        "divisor": packed["weight_global_scale"].squeeze(),
    }


@EVERY_INPUT
def test_compressed_tensors(x: Tensor) -> None:
    theirs = quantize_with_compressed_tensors(x)
    ours = quantize_weight(x, convention="compressed-tensors")
    assert torch.equal(ours.global_scale, theirs["divisor"].reciprocal())
    assert_same_bytes(ours.scales, theirs["scales"])
    assert_same_bytes(ours.data, theirs["data"])


def test_compressed_tensors_where_the_divisor_has_no_exact_reciprocal() -> None:
    """Codes equal the checkpoint's to the last bit, quantised with the stored divisor."""
    inexact = 0
    for dtype, seed in itertools.product(DTYPES, range(10)):
        for x in producer_inputs(dtype, seed).values():
            theirs = quantize_with_compressed_tensors(x)
            ours = quantize_weight(x, convention="compressed-tensors")
            assert torch.equal(global_scale_of(x, "compressed-tensors"), theirs["divisor"])
            assert_same_bytes(ours.scales, theirs["scales"])
            assert_same_bytes(ours.data, theirs["data"])
            inexact += bool(theirs["divisor"].reciprocal().reciprocal() != theirs["divisor"])
    assert inexact > 0


# --- vLLM's reference activation quantiser ----------------------------------------------------


def assert_same_as_vllm(x: Tensor, global_scale: Tensor) -> None:
    data, scales = quantize_activation(x, global_scale)
    values, their_scales = quantize_with_vllm(x, global_scale)
    assert_same_bytes(scales, their_scales)
    np.testing.assert_array_equal(oracle.unpack(data), values)


@EVERY_INPUT
@pytest.mark.parametrize("calibrated", [1.0, 0.25, 3.0], ids=["exact", "saturating", "loose"])
def test_activations_as_vllm(x: Tensor, calibrated: float) -> None:
    assert_same_as_vllm(x, global_scale_of(x) * calibrated)


@EVERY_INPUT
def test_activations_per_token_as_vllm(x: Tensor) -> None:
    assert_same_as_vllm(x, row_global_scales(x))
