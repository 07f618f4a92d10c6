"""Router of a mixture of experts: selection of experts from a token's logits, and weights.

Scores are the softmax over all experts, or each logit's sigmoid. The experts with the largest
scores, or with the largest sums of score and bias, are selected; with expert groups, only from the
best groups. A group's score is its best expert's score; with a bias, the sum of the best two.

The selected experts of a token are in descending order, ties in ascending order of experts, as in
vLLM's GPU kernels; ``torch.topk`` guarantees no order for ties. Without a bias logits are compared,
as scores are a monotone function of logits: if two scores round to the same number, the greater
logit wins. NaN is greater than any number. A token never has the same expert twice.
"""

import math
from typing import Literal, NamedTuple, get_args

import torch
from torch import Tensor

from nvfp4_kernels.checks import (
    InvalidArgument,
    check_dtype,
    check_same_device,
    check_shape,
)

Scoring = Literal["softmax", "sigmoid"]
LOGITS = (torch.bfloat16, torch.float16, torch.float32)
MAX_TOP_K = 32  # a lane of a warp for each
MAX_GROUPS = 32
MAX_EXPERTS = 1024  # of all ranks


class Router(NamedTuple):
    """Rule by which a layer's tokens select their experts.

    Attributes:
        top_k: number of slots (selected experts) per token.
        scoring: function from logits to scores.
        renormalize: whether a token's weights are divided by their sum.
        groups: number of groups of neighbouring experts.
        top_groups: number of groups from which a token selects experts.
        scale: factor that multiplies the weights, ``routed_scaling_factor``.
    """

    top_k: int
    scoring: Scoring = "softmax"
    renormalize: bool = True
    groups: int = 1
    top_groups: int = 1
    scale: float = 1.0


def checked(router: Router) -> Router:
    """Return ``router``, type-checked.

    Raises:
        InvalidArgument: ``router`` is not a ``Router``.
    """
    if not isinstance(router, Router):
        raise InvalidArgument(
            f"router: is {type(router).__name__}, must be a Router; give Router(top_k)"
        )
    return router


def check_router(
    router: Router, logits: Tensor, bias: Tensor | None, padding: Tensor | None
) -> None:
    """Raise unless ``router`` is valid for these logits, bias and padding."""
    check_dtype("logits", logits, LOGITS)
    if logits.ndim != 2 or not 0 < logits.shape[1] <= MAX_EXPERTS:
        raise InvalidArgument(
            f"logits: shape is {tuple(logits.shape)}, must be (M, E) with E from 1 to "
            f"{MAX_EXPERTS}; flatten the tokens"
        )
    experts = logits.shape[1]
    if router.scoring not in get_args(Scoring):
        accepted = ", ".join(get_args(Scoring))
        raise InvalidArgument(
            f"scoring: is {router.scoring}, must be {accepted}; choose experts before moe_route()"
        )
    _check_groups(router, experts, biased=bias is not None)
    most = min(MAX_TOP_K, experts // router.groups * router.top_groups)
    if not 0 < router.top_k <= most:
        raise InvalidArgument(
            f"top_k: is {router.top_k}, must be from 1 to {most}, the experts to choose from and "
            f"at most {MAX_TOP_K}; choose fewer"
        )
    if not math.isfinite(router.scale):
        raise InvalidArgument(
            f"scale: is {router.scale}, must be finite; give routed_scaling_factor, or 1.0"
        )
    if bias is not None:
        check_dtype("bias", bias, (torch.float32,))
        check_shape("bias", bias, (experts,), "give a number for each expert")
    if padding is not None:
        check_dtype("padding", padding, (torch.bool,))
        check_shape("padding", padding, (logits.shape[0],), "say of each token whether it is none")
    check_same_device(logits=logits, bias=bias, padding=padding)


def _check_groups(router: Router, experts: int, *, biased: bool) -> None:
    least = 2 if biased and router.groups > 1 else 1  # experts of a group
    most = min(MAX_GROUPS, experts // least)
    if not 0 < router.groups <= most or experts % router.groups:
        raise InvalidArgument(
            f"groups: is {router.groups}, must be a divisor of {experts} experts, from 1 to {most};"
            " give 1 for experts without groups"
        )
    if not 0 < router.top_groups <= router.groups:
        raise InvalidArgument(
            f"top_groups: is {router.top_groups}, must be from 1 to {router.groups}; "
            "choose fewer groups"
        )
