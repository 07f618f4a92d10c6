"""Custom op that all-reduces partial sums, adds the residual, normalises and quantises.

The number of tokens decides between FlashInfer's fused op and a separate all-reduce and norm. The
custom op hides the decision from ``torch.compile``, which must not specialise on that number.
"""

from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.library import Library, register_fake
from vllm.distributed import tensor_model_parallel_all_reduce

from nvfp4_kernels.device.rowwise.operands import new_operand
from nvfp4_kernels.dispatch import load_target
from nvfp4_kernels.formats.output import Static
from nvfp4_kernels.quantize.call import RmsNormQuantizeCall
from nvfp4_kernels.runtime.launch_cache import Prepared
from vllm_fp4_plugin.ops import flashinfer_all_reduce
from vllm_fp4_plugin.ops.define import readable

_LIBRARY = Library("nvfp4_tc", "FRAGMENT")
_NAME = "all_reduce_add_rms_norm_quantize"


class AllReduceNormCall(NamedTuple):
    """Arguments of ``all_reduce_add_rms_norm_quantize``, in the order of its schema.

    Attributes:
        partial: 16-bit ``(M, K)``, contiguous: this rank's partial sum; overwritten by the new
            residual.
        residual: of ``partial``'s shape and dtype; not modified.
        weight: ``(K,)``, of ``partial``'s dtype or float32.
        eps: epsilon of the norm.
        global_scale: float32 ``()``, global scale of the result.
        reciprocal: float32 ``()``, reciprocal of ``global_scale``, for flashinfer.
        terms: number of NVFP4 values whose sum represents each element of the result.
        kernel: target of a kernel of ``add_rms_norm_quantize``.
        tokens: maximum number of tokens for flashinfer's fused op; 0: never used.
        width: capacity of flashinfer's workspace in elements per token.
    """

    partial: Tensor
    residual: Tensor
    weight: Tensor
    eps: float
    global_scale: Tensor
    reciprocal: Tensor
    terms: int
    kernel: str
    tokens: int
    width: int


def _run(*arguments: Any) -> tuple[Tensor, Tensor]:
    """Compute ``add_rms_norm_quantize`` of the all-reduced partial sums.

    ``arguments`` are the fields of an ``AllReduceNormCall``.

    Returns:
        ``data`` and ``scales``, see ``nvfp4_kernels.add_rms_norm_quantize``.
    """
    call = AllReduceNormCall(*arguments)
    partial, tokens = call.partial, call.tokens
    # Called for steps with too many tokens too: the first call allocates, on all ranks together.
    served = flashinfer_all_reduce.usable_tokens(partial, tokens, call.width) if tokens else 0
    if 0 < len(partial) <= served:
        data, scales = new_operand(partial, partial.shape[1], call.terms)
        flashinfer_all_reduce.run(
            partial, readable(call.residual), call.weight, call.eps, call.reciprocal, tokens,
            data, scales,
        )  # fmt: skip
        return data, scales
    total = tensor_model_parallel_all_reduce(partial)
    # The new residual replaces the partial sums.
    return _norm(
        total, call.residual, call.weight, call.eps, call.global_scale, call.terms, partial,
        call.kernel,
    )  # fmt: skip


def _normalise(
    total: Tensor, residual: Tensor, weight: Tensor, eps: float, *given: Any
) -> tuple[Tensor, Tensor]:
    """Add the residual, normalise and quantise.

    ``given``: global scale and terms of the result, memory of the new residual, the kernel's
    target.
    """
    global_scale, terms, out, kernel = given
    output = Static(global_scale, terms)
    call = RmsNormQuantizeCall(readable(total), readable(residual), weight, eps, output, out)
    data, scales, _ = load_target(kernel)(call)
    return data, scales


_norm = Prepared(_normalise)


def _fake(partial: Tensor, *given: object) -> tuple[Tensor, Tensor]:
    terms = given[5]
    assert isinstance(terms, int)
    return new_operand(partial, partial.shape[1], terms)


_LIBRARY.define(
    f"{_NAME}(Tensor(a!) partial, Tensor residual, Tensor weight, float eps, Tensor global_scale, "
    "Tensor reciprocal, int terms, str kernel, int tokens, int width) -> (Tensor, Tensor)",
    tags=(torch.Tag.pt2_compliant_tag,),
)
_LIBRARY.impl(_NAME, _run, "CompositeExplicitAutograd")
register_fake(f"nvfp4_tc::{_NAME}", _fake, lib=_LIBRARY)
all_reduce_add_rms_norm_quantize = getattr(torch.ops.nvfp4_tc, _NAME).default
