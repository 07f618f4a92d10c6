"""NVFP4 kernels for torch: the format, and the ops that compute with it. Knows nothing of vLLM."""

from nvfp4_kernels.add_rms_norm import add_rms_norm
from nvfp4_kernels.attention import (
    HeadRotation,
    attention,
    paged_attention,
    paged_attention_quantized,
    rotary_attention,
    sparse_attention,
)
from nvfp4_kernels.checks import InvalidArgument
from nvfp4_kernels.decode_attention import decode_attention
from nvfp4_kernels.dispatch import NoKernelError
from nvfp4_kernels.gemm import gemm, gemm_quantized, gemv
from nvfp4_kernels.grouped_gemm import grouped_gemm, grouped_gemm_quantized
from nvfp4_kernels.grouped_silu_mul_gemm import (
    grouped_silu_mul_gemm,
    grouped_silu_mul_gemm_quantized,
)
from nvfp4_kernels.indexer import (
    indexer_gather_k,
    indexer_logits,
    indexer_logits_paged,
    indexer_quantize_q,
    indexer_score_topk,
    indexer_score_topk_paged,
    indexer_store_k,
    indexer_topk,
)
from nvfp4_kernels.merge_segments import merge_segments
from nvfp4_kernels.moe_combine import moe_combine
from nvfp4_kernels.moe_quantize import moe_gather, moe_quantize, moe_quantize_per_token
from nvfp4_kernels.moe_route import moe_route
from nvfp4_kernels.moe_route_quantize import (
    moe_route_gather,
    moe_route_quantize,
    moe_route_quantize_per_token,
)
from nvfp4_kernels.moe_topk import moe_topk
from nvfp4_kernels.moe_topk_route import (
    moe_topk_route_gather,
    moe_topk_route_quantize,
    moe_topk_route_quantize_per_token,
)
from nvfp4_kernels.nvfp4 import Nvfp4Tensor
from nvfp4_kernels.quantize import quantize, quantize_per_token
from nvfp4_kernels.rms_norm_quantize import (
    add_rms_norm_quantize,
    add_rms_norm_quantize_per_token,
    rms_norm_quantize,
    rms_norm_quantize_per_token,
)
from nvfp4_kernels.rotary_embedding import rotary_embedding
from nvfp4_kernels.rotary_store import rotary_store
from nvfp4_kernels.router import Router
from nvfp4_kernels.silu_mul_gemm import silu_mul_gemm, silu_mul_gemm_quantized
from nvfp4_kernels.silu_mul_quantize import silu_mul_quantize, silu_mul_quantize_per_token

__all__ = [
    "HeadRotation",
    "InvalidArgument",
    "NoKernelError",
    "Nvfp4Tensor",
    "Router",
    "add_rms_norm",
    "add_rms_norm_quantize",
    "add_rms_norm_quantize_per_token",
    "attention",
    "decode_attention",
    "gemm",
    "gemm_quantized",
    "gemv",
    "grouped_gemm",
    "grouped_gemm_quantized",
    "grouped_silu_mul_gemm",
    "grouped_silu_mul_gemm_quantized",
    "indexer_gather_k",
    "indexer_logits",
    "indexer_logits_paged",
    "indexer_quantize_q",
    "indexer_score_topk",
    "indexer_score_topk_paged",
    "indexer_store_k",
    "indexer_topk",
    "merge_segments",
    "moe_combine",
    "moe_gather",
    "moe_quantize",
    "moe_quantize_per_token",
    "moe_route",
    "moe_route_gather",
    "moe_route_quantize",
    "moe_route_quantize_per_token",
    "moe_topk",
    "moe_topk_route_gather",
    "moe_topk_route_quantize",
    "moe_topk_route_quantize_per_token",
    "paged_attention",
    "paged_attention_quantized",
    "quantize",
    "quantize_per_token",
    "rms_norm_quantize",
    "rms_norm_quantize_per_token",
    "rotary_attention",
    "rotary_embedding",
    "rotary_store",
    "silu_mul_gemm",
    "silu_mul_gemm_quantized",
    "silu_mul_quantize",
    "silu_mul_quantize_per_token",
    "sparse_attention",
]
