"""Kernels that a model's linear layers and their inputs need on sm_100. Imports no CuTe."""

from collections.abc import Callable
from typing import Literal

from nvfp4_kernels.formats.terms import TermLayout
from nvfp4_kernels.gemm.sm100.choose import Problem, choose_batch_invariant, choose_config
from nvfp4_kernels.gemm.sm100.tile import EpilogueConfig, Tile
from nvfp4_kernels.precompile.model import Dtype, Layer, Model
from nvfp4_kernels.precompile.spec import KernelSpec
from nvfp4_kernels.quantize.choose import choose_config as choose_quantize
from nvfp4_kernels.sm100.limits import SMS

# Scaling of activations: one calibrated global scale, or one per token.
Activation = Literal["static", "per-token"]
ACTIVATIONS: tuple[Activation, ...] = ("static", "per-token")
_ELEMENT_SIZE = 2  # of bfloat16 and float16


def block_scaled_kernels(
    model: Model,
    *,
    max_tokens: int,
    activations: tuple[Activation, ...] = ACTIVATIONS,
    terms: int = 1,
    batch_invariant: bool = False,
    sms: int = SMS,
) -> dict[KernelSpec, list[str]]:
    """Every kernel of ``model``'s linear layers and inputs, with the layers that the kernel serves.

    Args:
        model: dense decoder.
        max_tokens: maximum number of tokens in a batch; all numbers from 1 on are covered.
        activations: possible scalings of activations.
        terms: number of NVFP4 terms of activations.
        batch_invariant: whether GEMMs are batch-invariant.
        sms: SMs of the GPU.
    """
    found: dict[KernelSpec, list[str]] = {}
    for activation in activations:
        per_token = activation == "per-token"
        for layer in model.layers:
            specs = quantize_kernels(model.dtype, layer.k, max_tokens, per_token, terms, sms)
            tokens = 1 if batch_invariant else max_tokens
            choose = choose_batch_invariant if batch_invariant else choose_config
            specs += _product_kernels(choose, model.dtype, layer, tokens, per_token, terms, sms)
            for spec in specs:
                users = found.setdefault(spec, [])
                if layer.name not in users:
                    users.append(layer.name)
    return found


def quantize_kernels(
    dtype: Dtype, k: int, max_tokens: int, per_token: bool, terms: int, sms: int
) -> list[KernelSpec]:
    """Kernels that quantise a linear layer's inputs, 1 to ``max_tokens`` rows of ``k`` elements."""
    layouts = [
        (choose_quantize(m, k, _ELEMENT_SIZE, per_token, sms), TermLayout.of(terms, m))
        for m in range(1, max_tokens + 1)
    ]
    target = "nvfp4_kernels.quantize.sm100:QuantizeSm100"
    return [
        KernelSpec("quantize", target, (dtype, per_token, *layout))
        for layout in dict.fromkeys(layouts)
    ]


def _product_kernels(
    choose: Callable[[Problem, EpilogueConfig, int], tuple[Tile, EpilogueConfig]],
    dtype: Dtype,
    layer: Layer,
    max_tokens: int,
    per_token: bool,
    terms: int,
    sms: int,
) -> list[KernelSpec]:
    op = "silu_mul_gemm" if layer.gate_up else "gemm"
    chosen = [
        choose(
            Problem(m, layer.n, layer.k, 1, layer.weights, terms),
            layer_epilogue(layer, dtype, per_token, m),
            sms,
        )
        for m in range(1, max_tokens + 1)
    ]
    return [product_spec(op, *tile_and_output) for tile_and_output in dict.fromkeys(chosen)]


def layer_epilogue(layer: Layer, dtype: Dtype, per_token: bool, m: int) -> EpilogueConfig:
    """Epilogue of a layer's GEMM of ``m`` tokens."""
    return EpilogueConfig(
        "nvfp4" if layer.out_terms else dtype,
        shards=layer.shards,
        bias=dtype if layer.bias else "",
        row_scale=per_token,
        terms=TermLayout.of(max(1, layer.out_terms), m),
    )


def product_spec(op: str, tile: Tile, output: EpilogueConfig) -> KernelSpec:
    """Spec of a block-scaled GEMM."""
    return KernelSpec(op, "nvfp4_kernels.gemm.sm100.kernel:BlockScaledGemm", (tile, output))
