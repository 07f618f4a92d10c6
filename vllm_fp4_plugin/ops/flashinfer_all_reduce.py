"""FlashInfer's fused all-reduce, residual addition, RMSNorm and quantisation, by vLLM's wrapper.

This code has never run on a GPU: the call is checked against the wrapper's signature, and the
layouts against vLLM's own fusion pattern. FlashInfer writes no scales for padding rows, on which no
result depends, nor for padding columns; the row width must therefore be a multiple of ``ATOM``.
"""

from bisect import bisect_left
from typing import Any

import torch
from torch import Tensor
from vllm.distributed import (
    get_tensor_model_parallel_rank,
    get_tensor_model_parallel_world_size,
    get_tp_group,
)
from vllm.logger import init_logger

logger = init_logger("vllm.nvfp4_tc")

FAMILIES = {"sm_100"}  # device families for which vLLM registers its NVFP4 patterns
EPSILONS = (1e-5, 1e-6)  # epsilons in vLLM's patterns
ATOM = 64  # elements of a row whose scales are contiguous

_usable: list[int] = []  # token capacity of the workspace; empty until the first run


def _wrapper() -> Any:
    """Import the module of vLLM's wrapper, only when needed: the import queries the platform."""
    from vllm.compilation.passes.fusion import allreduce_rms_fusion

    return allreduce_rms_fusion


def widest(vllm_config: Any) -> int:
    """Workspace's row width in elements: the larger hidden size of target and draft, as in vLLM."""
    configs = [vllm_config.model_config]
    if vllm_config.speculative_config is not None:
        configs.append(vllm_config.speculative_config.draft_model_config)
    return max(each.get_hidden_size() for each in configs if each is not None)


def most_tokens(
    vllm_config: Any, family: str, terms: int, norm: Any, dtype: torch.dtype
) -> tuple[int, str]:
    """Maximum number of tokens for which FlashInfer's op replaces a norm and its all-reduce.

    Args:
        vllm_config: config of the engine.
        family: device family of the norm's own kernel.
        terms: number of NVFP4 values whose sum represents each element of the norm's result.
        norm: the RMSNorm.
        dtype: dtype of the partial sums.

    Returns:
        Number of tokens, and the reason if the number is 0.
    """
    reasons = {
        f"none on {family}": family not in FAMILIES,
        f"none for {terms} terms": terms != 1,
        f"none for weights of {norm.weight.dtype}": norm.weight.dtype != dtype,
        f"none for an eps of {norm.variance_epsilon}": norm.variance_epsilon not in EPSILONS,
        f"none for rows of {norm.hidden_size}, no multiple of {ATOM}": norm.hidden_size % ATOM != 0,
    }
    why_not = next((reason for reason, holds in reasons.items() if holds), "")
    if why_not:
        return 0, why_not
    if _wrapper().flashinfer_comm is None:
        return 0, "not installed"
    ranks = get_tensor_model_parallel_world_size()
    size = vllm_config.compilation_config.pass_config.flashinfer_max_size(ranks)
    if not size:
        return 0, f"none for {ranks} ranks"
    tokens = size // (widest(vllm_config) * dtype.itemsize)
    return min(tokens, vllm_config.scheduler_config.max_num_batched_tokens), ""


def usable_tokens(x: Tensor, tokens: int, width: int) -> int:
    """Token capacity of the workspace, at most ``tokens``.

    The first call allocates the workspace, on all ranks together; that call comes in vLLM's profile
    run, before graph capture.

    Args:
        x: partial sum of this rank.
        tokens: requested number of tokens.
        width: requested elements per token.
    """
    if not _usable:
        _usable.append(_make_workspace(x, tokens, width))
        if _usable[0] < tokens:
            logger.warning(
                "nvfp4-tc: flashinfer's workspace serves %d tokens, not %d; above that all-reduce "
                "and norm run apart",
                _usable[0],
                tokens,
            )
    return min(_usable[0], tokens)


def _make_workspace(x: Tensor, tokens: int, width: int) -> int:
    from vllm.distributed.device_communicators.flashinfer_all_reduce import (
        get_fi_ar_quant_workspace,
    )

    group, ranks = get_tp_group().cpu_group, get_tensor_model_parallel_world_size()
    workspace = get_fi_ar_quant_workspace(
        world_size=ranks,
        rank=get_tensor_model_parallel_rank(),
        max_token_num=tokens,
        hidden_dim=width,
        dtype=x.dtype,
        group=group,
    )

    def is_too_many(count: int) -> bool:
        return not workspace.is_buffer_size_sufficient(
            tp_size=ranks, num_tokens=count, hidden_dim=width, dtype=x.dtype
        )

    # The workspace may rotate several buffers, so that each holds fewer tokens.
    counts = range(1, tokens + 1)
    served = 0 if workspace is None else bisect_left(counts, True, key=is_too_many)
    # Ranks must agree: a rank that calls the op alone would wait forever.
    agreed = torch.tensor(served)
    torch.distributed.all_reduce(agreed, torch.distributed.ReduceOp.MIN, group=group)
    return int(agreed)


def run(
    partial: Tensor,
    residual: Tensor,
    weight: Tensor,
    eps: float,
    reciprocal: Tensor,
    tokens: int,
    data: Tensor,
    scales: Tensor,
) -> None:
    """All-reduce the partial sums, add the residual, normalise, and quantise.

    Args:
        partial: 16-bit ``(M, K)``, this rank's partial sum; overwritten by the new residual.
        residual: of ``partial``'s shape and dtype; not modified.
        weight: ``(K,)``, of ``partial``'s dtype.
        eps: epsilon of the norm.
        reciprocal: float32 ``()``, reciprocal of the result's global scale.
        tokens: number of tokens for which the workspace was requested, at least M.
        data: uint8 ``(M, K/2)``, overwritten.
        scales: float8_e4m3fn, blocked layout, overwritten.
    """
    wrapper = _wrapper()
    patterns = wrapper.flashinfer_comm.AllReduceFusionPattern
    sizes = wrapper.FlashInferFusedAllReduceParams(get_tensor_model_parallel_world_size(), tokens)
    wrapper.call_trtllm_fused_allreduce_norm(
        allreduce_in=partial,
        residual=residual,
        rms_gamma=weight,
        rms_eps=eps,
        pattern_code=patterns.kARResidualRMSNormFP4Quant,
        # With norm_out, the new residual goes to allreduce_in; without, it overwrites the old
        # residual.
        norm_out=torch.empty_like(partial),
        quant_out=data,
        scale_out=scales.view(-1, partial.shape[1] // 16),
        scale_factor=reciprocal,
        **sizes.get_trtllm_fused_allreduce_kwargs(),
    )
