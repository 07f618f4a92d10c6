"""Routing of a mixture of experts: top-k, align and permute, quantisation, unpermute (combine)."""

from nvfp4_kernels.moe.combine.op import moe_combine
from nvfp4_kernels.moe.dispatch.call import Dispatched, Ids, Logits
from nvfp4_kernels.moe.dispatch.op import moe_dispatch
from nvfp4_kernels.moe.route.op import moe_route
from nvfp4_kernels.moe.router import Router
from nvfp4_kernels.moe.routing import Routing
from nvfp4_kernels.moe.topk.op import moe_topk

__all__ = [
    "Dispatched",
    "Ids",
    "Logits",
    "Router",
    "Routing",
    "moe_combine",
    "moe_dispatch",
    "moe_route",
    "moe_topk",
]
