"""Router of a mixture of experts: which experts a token's logits choose, and their weights.

Scores are the softmax over all experts, or each logit's sigmoid. Chosen are those with the largest
scores, or sums of score and bias where there is one; of groups of experts, the best ones first, and
experts of these alone. A group is as good as its best expert, with a bias as its best two together.

Slots of a token descend, and of equal ones the lowest expert comes first, as with vLLM's kernels on
GPUs; ``torch.topk`` promises nothing of equal ones. Without a bias logits stand for their scores,
which ascend as they do: of scores that round to the same number the greater logit's comes first.
NaN is greater than any number. A token never has the same expert twice.
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
    """Rule that a layer's tokens choose their experts by.

    Attributes:
        top_k: slots of a token.
        scoring: how logits become scores.
        renormalize: a token's weights are divided by their sum.
        groups: groups of neighbouring experts.
        top_groups: that a token's experts come from.
        scale: factor of the weights, ``routed_scaling_factor``.
    """

    top_k: int
    scoring: Scoring = "softmax"
    renormalize: bool = True
    groups: int = 1
    top_groups: int = 1
    scale: float = 1.0


def checked(router: Router) -> Router:
    """The same rule, if it is one.

    Raises:
        InvalidArgument: it is no ``Router``.
    """
    if not isinstance(router, Router):
        raise InvalidArgument(
            f"router: is {type(router).__name__}, must be a Router; give Router(top_k)"
        )
    return router


def check_router(
    router: Router, logits: Tensor, bias: Tensor | None, padding: Tensor | None
) -> None:
    """Raise unless tokens with such logits can be routed so."""
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
