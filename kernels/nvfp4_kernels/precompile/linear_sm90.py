"""Kernels that a model's linear layers need on sm_90, for any number of tokens. Imports no CuTe.

On sm_90 only weights are quantised, so that inputs need no kernels.
"""

from nvfp4_kernels.gemm.sm90.choose import all_configs
from nvfp4_kernels.gemm.sm90.tile import EpilogueConfig, Tile
from nvfp4_kernels.precompile.model import Dtype, Layer, Model
from nvfp4_kernels.precompile.spec import KernelSpec
from nvfp4_kernels.sm90.limits import SMS


def weight_only_kernels(
    model: Model, *, max_tokens: int, batch_invariant: bool = False, sms: int = SMS
) -> dict[KernelSpec, list[str]]:
    """Every kernel of ``model``'s linear layers, with the layers that the kernel serves.

    Args:
        model: dense decoder.
        max_tokens: maximum number of tokens in a batch; all numbers from 1 on are covered.
        batch_invariant: whether GEMMs are batch-invariant.
        sms: SMs of the GPU.
    """
    found: dict[KernelSpec, list[str]] = {}
    for layer in model.layers:
        output = weight_only_epilogue(layer, model.dtype)
        op = "silu_mul_gemm" if layer.gate_up else "gemm"
        sizes = layer.n, layer.k, layer.weights
        configs = all_configs(*sizes, output, max_tokens, sms=sms, batch_invariant=batch_invariant)
        for tile_and_output in configs:
            users = found.setdefault(weight_only_spec(op, *tile_and_output), [])
            if layer.name not in users:
                users.append(layer.name)
    return found


def weight_only_epilogue(layer: Layer, dtype: Dtype) -> EpilogueConfig:
    """Epilogue of a layer's GEMM."""
    bias = dtype if layer.bias else ""
    return EpilogueConfig(act=dtype, dtype=dtype, shards=layer.shards, bias=bias)


def weight_only_spec(op: str, tile: Tile, output: EpilogueConfig) -> KernelSpec:
    """Spec of a weight-only GEMM."""
    return KernelSpec(op, "nvfp4_kernels.gemm.sm90.kernel:WeightOnlyGemm", (tile, output))
