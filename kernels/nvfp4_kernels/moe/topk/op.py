"""``moe_topk``: which experts each token goes to, and with what weights."""

import torch
from torch import Tensor

from nvfp4_kernels.moe.router import Router, Scoring, check_router, checked
from nvfp4_kernels.moe.topk.kernels import KERNELS


def moe_topk(
    logits: Tensor, router: Router, bias: Tensor | None = None, padding: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """Choose the experts of each token, and weigh them.

    Args:
        logits: bfloat16, float16 or float32 ``(M, E)``, at most 1024 experts; the arithmetic is
            float32.
        router: the rule.
        bias: float32 ``(E,)``, added to scores for the choice alone; None: there is none.
        padding: bool ``(M,)``, rows that are no tokens: their experts are -1, their weights 0;
            None: all are tokens.

    Returns:
        ``topk_weights`` float32 ``(M, k)`` and ``topk_ids`` int32 ``(M, k)``.

    Raises:
        InvalidArgument: an unsupported dtype, shape or number, named.
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
    """Router of an op's arguments; ``check_router`` has yet to see it."""
    known: Scoring = scoring  # type: ignore[assignment]
    return Router(top_k, known, renormalize, groups, top_groups, scale)


def new_topk(logits: Tensor, top_k: int) -> tuple[Tensor, Tensor]:
    """Memory for weights and ids."""
    shape = (logits.shape[0], top_k)
    return logits.new_empty(shape, dtype=torch.float32), logits.new_empty(shape, dtype=torch.int32)
