"""Choice of the rows per token tile (padded expert block) for both GEMMs of an MoE layer."""

from typing import NamedTuple

import torch

from nvfp4_kernels.devices import FAMILIES, device_facts
from nvfp4_kernels.gemm.sm90 import choose_grouped as sm90
from nvfp4_kernels.gemm.sm100 import choose_grouped as sm100
from nvfp4_kernels.moe.routing import tile_tokens_of

_MOST_ON_CPU = 64  # upper bound, so that padding costs a reference little


class ExpertSizes(NamedTuple):
    """Sizes of a layer's experts on one rank.

    Attributes:
        h: hidden size.
        i: intermediate size, padded as in the weights.
        held: number of this rank's experts.
        total: number of experts of all ranks.
        gated: whether experts have a gate.
    """

    h: int
    i: int
    held: int
    total: int
    gated: bool = True


def choose_tile_tokens(device: torch.device, tokens: int, top_k: int, sizes: ExpertSizes) -> int:
    """Choose the number of rows per token tile for both GEMMs, one of ``routing.TILE_TOKENS``.

    Args:
        device: a GPU, a device that stands in for a GPU, or the CPU.
        tokens: number of tokens, M.
        top_k: number of experts per token, k.
        sizes: sizes of the layer.
    """
    facts = device_facts(device)
    family = FAMILIES.get(facts.arch, facts.arch)
    return tile_tokens(family, tokens, top_k, sizes, facts.sms)


def tile_tokens(family: str, tokens: int, top_k: int, sizes: ExpertSizes, sms: int) -> int:
    """Choose the number of rows per token tile for a family of devices; see ``choose_tile_tokens``.

    Args:
        family: ``"cpu"``, ``"sm_90"`` or ``"sm_100"``.
        tokens: see ``choose_tile_tokens``.
        top_k: see ``choose_tile_tokens``.
        sizes: see ``choose_tile_tokens``.
        sms: number of SMs; unused for the CPU.
    """
    if family == "cpu":
        return tile_tokens_of(tokens, top_k, sizes.total, most=_MOST_ON_CPU)
    choose = {"sm_90": sm90, "sm_100": sm100}[family].choose_tile_tokens
    of_layer = sizes.held, sizes.total, sizes.i, sizes.h
    return choose(tokens, top_k, *of_layer, weights=2 if sizes.gated else 1, sms=sms)
