"""Kernels compiled ahead for E4M3 activations on sm_90: exactly the kernels that the ops launch."""

import json
from collections.abc import Iterator
from importlib import import_module
from pathlib import Path
from typing import Any

import pytest
import torch

from nvfp4_kernels import PerTokenFp8, StaticFp8
from nvfp4_kernels.precompile.fp8_rows_sm90 import fp8_rows_kernels, norm_kernels
from nvfp4_kernels.quantize.call import QuantizeCall, RmsNormQuantizeCall, SiluMulQuantizeCall
from nvfp4_kernels.runtime.compile import DeviceKernel
from nvfp4_kernels.tool.model import read_model
from tests import devices
from tests.emulator import EAGER
from tests.test_kernels.precompile.model_configs import LLAMA_8B, LLAMA_70B

MODELS: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "8B": ({}, {"fuse_mlp": True}),
    "8B, float16": ({"dtype": "float16"}, {"fuse_mlp": True}),
    "70B on four GPUs": (LLAMA_70B, {"tensor_parallel": 4, "fuse_mlp": True}),
}
MOST = 300  # tokens: more than two for each SM


@pytest.fixture(autouse=True)
def emulator() -> Iterator[None]:
    """Emulate a GPU, whose SMs count, and to whose runtime CuTe DSL is bound."""
    devices.cutlass_or_skip()
    with devices.emulated_ops(EAGER, "sm_90"):
        yield


@pytest.mark.parametrize("per_token", [False, True], ids=["static", "per token"])
@pytest.mark.parametrize("name", MODELS)
def test_what_is_built_is_what_is_launched(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str, per_token: bool
) -> None:
    changed, options = MODELS[name]
    (tmp_path / "config.json").write_text(json.dumps(LLAMA_8B | changed))
    model = read_model(tmp_path, **options)
    launched: set[DeviceKernel] = set()
    plain, silu_mul, norm = (
        import_module(f"nvfp4_kernels.quantize{room}.sm90")
        for room in ("", ".silu_mul", ".rms_norm")
    )
    for module in (plain, silu_mul, norm):
        monkeypatch.setattr(module, "launch", lambda kernel, *_: launched.add(kernel))
    dtype = getattr(torch, model.dtype)
    output = PerTokenFp8() if per_token else StaticFp8(torch.tensor(1.0))
    down = {layer.n for layer in model.layers if layer.gate_up}
    assert down
    for tokens in (1, 7, 64, 131, 132, 133, 200, 263, 264, 265, MOST):
        for layer in model.layers:
            plain.quantize(QuantizeCall(torch.zeros(tokens, layer.k, dtype=dtype), output))
        for k in down:
            gate_up = torch.zeros(tokens, 2 * k, dtype=dtype)
            silu_mul.silu_mul_quantize(SiluMulQuantizeCall(gate_up, output))
        x = torch.zeros(tokens, model.hidden, dtype=dtype)
        for residual in (None, x):
            norm.rms_norm_quantize(RmsNormQuantizeCall(x, residual, x[0], 1e-5, output))
    built = fp8_rows_kernels(model, max_tokens=MOST, per_token=per_token)
    assert {spec.kernel() for spec in built} == launched


def test_rows_that_the_norms_do_not_take_have_none() -> None:
    assert len(norm_kernels("bfloat16", "float32", 24576, per_token=True)) == 2
    assert norm_kernels("bfloat16", "float32", 24592, per_token=True) == []
