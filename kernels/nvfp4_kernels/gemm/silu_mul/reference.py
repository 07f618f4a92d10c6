"""``silu_mul_gemm`` in torch: the reference, which is also the CPU kernel."""

from functools import partial

import torch
from torch import Tensor

from nvfp4_kernels.each_row import by_row
from nvfp4_kernels.gemm.call import SiluMulGemmCall
from nvfp4_kernels.gemm.reference import product, result_of, values_of


def silu_mul_gemm(
    call: SiluMulGemmCall, *, batch_invariant: bool = False
) -> tuple[Tensor, Tensor | None]:
    """See ``nvfp4_kernels.gemm.silu_mul.op``.

    ``batch_invariant`` and the pair returned are as in ``nvfp4_kernels.gemm.reference.gemm``.
    """
    values = values_of(call)
    gate, up = (
        product(values, *weight, call.rows, batch_invariant).mul_(factor)
        for weight, factor in zip(call.weights, call.alpha, strict=True)
    )
    if call.row_scale is not None:
        gate.mul_(call.row_scale.unsqueeze(-1))
        up.mul_(call.row_scale.unsqueeze(-1))
    silu = torch.nn.functional.silu
    out = (by_row(silu, gate) if batch_invariant else silu(gate)).mul_(up)
    return result_of(call, out)


silu_mul_gemm_batch_invariant = partial(silu_mul_gemm, batch_invariant=True)
