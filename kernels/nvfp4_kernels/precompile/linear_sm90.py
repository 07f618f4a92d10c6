"""Kernels that a model's linear layers need on sm_90, for any number of tokens. Imports no CuTe.

Activations are in 16 bits, or E4M3: then inputs need kernels, too.
"""

from collections.abc import Iterable

from nvfp4_kernels.formats.fp8_rows import padded
from nvfp4_kernels.gemm.sm90 import choose_fp8
from nvfp4_kernels.gemm.sm90.choose import all_configs
from nvfp4_kernels.gemm.sm90.tile import EpilogueConfig, Tile
from nvfp4_kernels.precompile.fp8_rows_sm90 import quantize_kernels
from nvfp4_kernels.precompile.model import Dtype, Layer, Model
from nvfp4_kernels.precompile.spec import KernelSpec
from nvfp4_kernels.sm90.limits import SMS


def weight_only_kernels(
    model: Model, *, max_tokens: int, batch_invariant: bool = False, sms: int = SMS
) -> dict[KernelSpec, list[str]]:
    """Every kernel of ``model``'s linear layers with 16-bit activations, with the layers it serves.

    Args:
        model: dense decoder.
        max_tokens: maximum number of tokens in a batch; all numbers from 1 on are covered.
        batch_invariant: whether GEMMs are batch-invariant.
        sms: SMs of the GPU.
    """
    found: dict[KernelSpec, list[str]] = {}
    for layer in model.layers:
        output = weight_only_epilogue(layer, model.dtype)
        sizes = layer.n, layer.k, layer.weights
        configs = all_configs(*sizes, output, max_tokens, sms=sms, batch_invariant=batch_invariant)
        _add(found, layer, [weight_only_spec(_op(layer), *config) for config in configs])
    return found


def fp8_kernels(
    model: Model,
    *,
    max_tokens: int,
    per_token: bool,
    batch_invariant: bool = False,
    sms: int = SMS,
) -> dict[KernelSpec, list[str]]:
    """Every kernel of ``model``'s linear layers with E4M3 activations, and of their inputs.

    Args:
        model: dense decoder; a layer with ``out_terms`` writes E4M3.
        max_tokens: maximum number of tokens in a batch; all numbers from 1 on are covered.
        per_token: whether each token has its own scale.
        batch_invariant: whether GEMMs are batch-invariant.
        sms: SMs of the GPU.

    Returns:
        Kernels, with the layers that each serves.
    """
    found: dict[KernelSpec, list[str]] = {}
    for layer in model.layers:
        sizes = layer.n, padded(layer.k), layer.weights
        output = fp8_epilogue(layer, model.dtype, per_token)
        configs = choose_fp8.all_configs(
            *sizes, output, max_tokens, sms=sms, batch_invariant=batch_invariant
        )
        specs = quantize_kernels(model.dtype, layer.k, max_tokens, per_token, sms)
        _add(found, layer, specs + [weight_only_spec(_op(layer), *each) for each in configs])
    return found


def _add(found: dict[KernelSpec, list[str]], layer: Layer, specs: Iterable[KernelSpec]) -> None:
    for spec in specs:
        users = found.setdefault(spec, [])
        if layer.name not in users:
            users.append(layer.name)


def _op(layer: Layer) -> str:
    return "silu_mul_gemm" if layer.gate_up else "gemm"


def weight_only_epilogue(layer: Layer, dtype: Dtype) -> EpilogueConfig:
    """Epilogue of a layer's GEMM of 16-bit activations."""
    bias = dtype if layer.bias else ""
    return EpilogueConfig(act=dtype, dtype=dtype, shards=layer.shards, bias=bias)


def fp8_epilogue(layer: Layer, dtype: Dtype, per_token: bool) -> EpilogueConfig:
    """Epilogue of a layer's GEMM of E4M3 activations."""
    return EpilogueConfig(
        act="float8_e4m3fn",
        dtype="float8_e4m3fn" if layer.out_terms else dtype,
        per_token=per_token,
        bias=dtype if layer.bias else "",
    )


def weight_only_spec(op: str, tile: Tile, output: EpilogueConfig) -> KernelSpec:
    """Spec of a GEMM of 16-bit or E4M3 activations."""
    return KernelSpec(op, "nvfp4_kernels.gemm.sm90.kernel:WeightOnlyGemm", (tile, output))
