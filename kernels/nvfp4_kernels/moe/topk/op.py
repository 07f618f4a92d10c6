"""``moe_topk``: top-k experts of each token, and their routing weights."""

import torch
from torch import Tensor

from nvfp4_kernels.moe.router import Router, Scoring, check_router, checked
from nvfp4_kernels.moe.topk.kernels import KERNELS


def moe_topk(
    logits: Tensor, router: Router, bias: Tensor | None = None, padding: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """Select the top-k experts of each token and compute routing weights.

    Args:
        logits: bfloat16, float16 or float32 ``(M, E)``, at most 1024 experts; the arithmetic is
            float32.
        router: routing rule.
        bias: float32 ``(E,)``, added to scores for selection only; None: no bias.
        padding: bool ``(M,)``, true for rows that are not tokens, which get experts -1 and weights
            0; None: all rows are tokens.

    Returns:
        ``topk_weights`` float32 ``(M, k)`` and ``topk_ids`` int32 ``(M, k)``.

    Raises:
        InvalidArgument: an unsupported dtype, shape or number; the message names it.
        NoKernelError: no kernel for this device.
    """
    return torch.ops.nvfp4.moe_topk(logits, bias, padding, *checked(router))


@torch.library.custom_op("nvfp4::moe_topk", mutates_args=())
def _moe_topk(
    logits: Tensor,
    bias: Tensor | None,
    padding: Tensor | None,
    top_k: int,
    scoring: str,
    renormalize: bool,
    groups: int,
    top_groups: int,
    scale: float,
) -> tuple[Tensor, Tensor]:
    router = router_of(top_k, scoring, renormalize, groups, top_groups, scale)
    check_router(router, logits, bias, padding)
    return KERNELS.select(logits.device, "float").load()(logits, bias, padding, router)


@_moe_topk.register_fake
def _(
    logits: Tensor, bias: Tensor | None, padding: Tensor | None, top_k: int, *rule: object
) -> tuple[Tensor, Tensor]:
    return new_topk(logits, top_k)


def router_of(
    top_k: int, scoring: str, renormalize: bool, groups: int, top_groups: int, scale: float
) -> Router:
    """``Router`` with a custom op's arguments, which ``check_router`` has yet to check."""
    known: Scoring = scoring  # type: ignore[assignment]
    return Router(top_k, known, renormalize, groups, top_groups, scale)


def new_topk(logits: Tensor, top_k: int) -> tuple[Tensor, Tensor]:
    """Allocate routing weights and expert ids."""
    shape = (logits.shape[0], top_k)
    return logits.new_empty(shape, dtype=torch.float32), logits.new_empty(shape, dtype=torch.int32)
