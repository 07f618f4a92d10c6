"""Results of ``moe_dispatch`` as tuples of the tensors that a call makes."""

from torch import Tensor

from nvfp4_kernels import Dispatched


def tiles_of(found: Dispatched) -> tuple[Tensor, ...]:
    """Data, scales and row scales, as far as the format has them."""
    parts = found.data, found.scales, found.row_scale
    return tuple(part for part in parts if part is not None)


def made_of(found: Dispatched) -> tuple[Tensor, ...]:
    """Routing weights of selected experts, then the routing, then the tiles."""
    weights = () if found.topk_weights is None else (found.topk_weights,)
    return *weights, *found.routing, *tiles_of(found)
