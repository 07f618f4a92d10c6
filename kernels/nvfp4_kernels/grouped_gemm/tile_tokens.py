"""Choice of a routing's tiles: how many rows the products of a layer want."""

import torch

from nvfp4_kernels.routing import tile_tokens_of

_MOST_ON_CPU = 64  # of which padding costs a reference little


def choose_tile_tokens(
    device: torch.device, tokens: int, top_k: int, experts: int, held: int, h: int, i: int
) -> int:
    """Rows of a token tile for both products of a layer on a device.

    Args:
        device: the device, or what stands in for it.
        tokens: M.
        top_k: slots of each, k.
        experts: of all ranks.
        held: experts of this rank.
        h: width of the layer's input and result.
        i: width between the products.

    Returns:
        One of ``routing.TILE_TOKENS``.
    """
    return tile_tokens_of(tokens, top_k, experts, most=_MOST_ON_CPU)
