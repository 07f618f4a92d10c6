"""Tokens of a mixture of experts brought into token tiles, as NVFP4 or as they are."""

from nvfp4_kernels.moe_quantize.op import moe_gather, moe_quantize, moe_quantize_per_token

__all__ = ["moe_gather", "moe_quantize", "moe_quantize_per_token"]
