"""Limits of NVFP4 linear layers: dtypes, sizes and quantization that kernels can serve."""

from collections.abc import Sequence
from typing import Any

import torch

from nvfp4_kernels.device.row_vectors.tile import VECTOR
from nvfp4_kernels.device.row_vectors.tile import longest_row as fp8_longest_row
from nvfp4_kernels.device.rowwise.tile import longest_row
from nvfp4_kernels.dispatch import Kernel
from nvfp4_kernels.formats.nvfp4 import BLOCK_SIZE
from nvfp4_kernels.gemm.arguments import A16_DTYPES, MAX_SHARDS
from vllm_fp4_plugin.formats import UnsupportedCheckpoint
from vllm_fp4_plugin.options import Activation


def check_layer(prefix: str, layer: Any, k: int, dtype: torch.dtype) -> None:
    """Check that any kernel can serve a layer.

    Args:
        prefix: name of the layer.
        layer: the layer.
        k: input elements per token on this rank.
        dtype: dtype of the input.

    Raises:
        UnsupportedCheckpoint: the dtype is not of 16 bits, or K is not a multiple of the block
            size.
    """
    if dtype not in A16_DTYPES:
        raise UnsupportedCheckpoint(
            f"{prefix}: dtype is {dtype}, must be bfloat16 or float16; serve with --dtype bfloat16"
        )
    if layer.input_size % BLOCK_SIZE:
        raise UnsupportedCheckpoint(
            f"{prefix}: K is {layer.input_size}, must be a multiple of {BLOCK_SIZE}; "
            "leave the layer unquantised: of a 16-bit checkpoint with nvfp4_tc.ignore"
        )
    if k % BLOCK_SIZE:
        raise UnsupportedCheckpoint(
            f"{prefix}: K is {layer.input_size}, which tensor parallelism of {layer.tp_size} cuts "
            f"into {k}; each part must be a multiple of {BLOCK_SIZE}; use a smaller "
            "--tensor-parallel-size or leave the layer unquantised"
        )


def check_kernel(
    prefix: str, kernel: Kernel, activation: Activation, k: int, sizes: Sequence[int]
) -> None:
    """Check that the kernel chosen for a layer can serve it.

    Args:
        prefix: name of the layer.
        kernel: GEMM kernel.
        activation: quantization of the layer's input.
        k: input elements per token on this rank.
        sizes: output widths of the shards on this rank.

    Raises:
        UnsupportedCheckpoint: MLA's ``kv_b_proj`` has a static input scale, K is too long for a
            scale per token, or the layer joins too many projections.
    """
    if activation == "static" and prefix.endswith(".kv_b_proj"):
        raise UnsupportedCheckpoint(
            f"{prefix}: is quantised with its activations, but MLA needs its weight alone; "
            "quantise the model with kv_b_proj excluded"
        )
    if kernel.arch == "cpu":
        return
    is_fp8 = kernel.mode == "w4a8"
    longest = fp8_longest_row(words=VECTOR // 2) if is_fp8 else longest_row(BLOCK_SIZE // 2)
    if activation == "per-token" and k > longest:
        raise UnsupportedCheckpoint(
            f"{prefix}: K is {k} on each rank, must be at most {longest} on {kernel.arch} for a "
            "scale per token; use a larger --tensor-parallel-size, or leave the layer unquantised"
        )
    if len(sizes) > MAX_SHARDS:
        raise UnsupportedCheckpoint(
            f"{prefix}: joins {len(sizes)} projections, must join at most {MAX_SHARDS} on "
            f"{kernel.arch}; leave the layer unquantised"
        )
