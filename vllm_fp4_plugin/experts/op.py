"""Custom op of a layer's experts: dynamo, which traces through vLLM's layer on CPU, sees one call.

Which experts a batch reaches is known on the device alone, and must not be specialised on.
"""

from typing import Any

import torch
from torch import Tensor
from torch.library import Library, register_fake

from vllm_fp4_plugin.experts.arithmetic import Activation, Experts, mixture

_LIBRARY = Library("nvfp4_tc", "FRAGMENT")


def _experts(
    x: Tensor,
    topk_weights: Tensor,
    topk_ids: Tensor,
    expert_map: Tensor | None,
    w13: Tensor,
    w13_scale: Tensor,
    w13_global: Tensor,
    w2: Tensor,
    w2_scale: Tensor,
    w2_global: Tensor,
    w13_input: Tensor | None,
    w2_input: Tensor | None,
    activation: str,
    limit: float | None,
    alpha: float,
    beta: float,
    weight_on_input: bool,
) -> Tensor:
    """See ``arithmetic.mixture``, ``Experts`` and ``Activation``."""
    held = Experts(w13, w13_scale, w13_global, w2, w2_scale, w2_global, w13_input, w2_input)
    between = Activation(activation, limit, alpha, beta)
    return mixture(
        x, topk_weights, topk_ids, expert_map, held, between, weight_on_input=weight_on_input
    )


_LIBRARY.define(
    "experts(Tensor x, Tensor topk_weights, Tensor topk_ids, Tensor? expert_map, Tensor w13, "
    "Tensor w13_scale, Tensor w13_global, Tensor w2, Tensor w2_scale, Tensor w2_global, "
    "Tensor? w13_input, Tensor? w2_input, str activation, float? limit, float alpha, float beta, "
    "bool weight_on_input) -> Tensor",
    tags=(torch.Tag.pt2_compliant_tag,),
)
_LIBRARY.impl("experts", _experts, "CompositeExplicitAutograd")
experts = torch.ops.nvfp4_tc.experts.default


@register_fake("nvfp4_tc::experts", lib=_LIBRARY)
def _(x: Tensor, *rest: Any) -> Tensor:
    return torch.empty_like(x)
