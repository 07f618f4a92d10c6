"""``moe_quantize`` and its siblings: inputs of the experts' first GEMM, in token tiles."""

import torch
from torch import Tensor

from nvfp4_kernels.checks import (
    InvalidArgument,
    check_blocks_of_16,
    check_dtype,
    check_same_device,
    check_shape,
)
from nvfp4_kernels.devices import device_arch
from nvfp4_kernels.formats.terms import check_terms, data_shape, scales_shape
from nvfp4_kernels.moe.quantize.kernels import GATHER_KERNELS, KERNELS, PER_TOKEN_KERNELS
from nvfp4_kernels.moe.routing import Routing, check_routing, check_slots, parts_of

DTYPES = (torch.bfloat16, torch.float16)


def moe_quantize(
    x: Tensor,
    routing: Routing,
    global_scale: Tensor,
    topk_weights: Tensor | None = None,
    terms: int = 1,
) -> tuple[Tensor, Tensor]:
    """Quantise and permute tokens into token tiles, with one calibrated global scale.

    A row equals ``quantize`` of its token. Padding rows have zero data and scales.

    Args:
        x: bfloat16 or float16 ``(M, K)``, K a multiple of 16; or ``(tiles, T, K)``, already in
            tiles. On a GPU contiguous and 32-byte aligned.
        routing: routing of the tokens.
        global_scale: float32 ``()``, global scale, as for ``quantize``.
        topk_weights: float32 ``(M, k)``: routing weights, applied to the tokens first, in float32
            rounded to x's dtype. None: not applied.
        terms: number of NVFP4 terms of ``x``, 1 to 4 (see ``nvfp4_kernels.formats.terms``).

    Returns:
        ``data`` uint8 ``(tiles, T, K/2)`` and ``scales`` float8_e4m3fn in the blocked layout of
        each tile; with several terms, ``data`` ``(tiles, terms, T, K/2)`` and the scales of stacked
        rows. Unused tiles are not written.

    Raises:
        InvalidArgument: an unsupported dtype, shape, stride or alignment, named.
        NoKernelError: no kernel for this device.
    """
    return torch.ops.nvfp4.moe_quantize(x, *parts_of(routing), global_scale, topk_weights, terms)


def moe_quantize_per_token(
    x: Tensor, routing: Routing, topk_weights: Tensor | None = None, terms: int = 1
) -> tuple[Tensor, Tensor, Tensor]:
    """Quantise and permute tokens into token tiles, with a global scale per token.

    Arguments as for ``moe_quantize``.

    Returns:
        ``data`` and ``scales`` as ``moe_quantize``, and ``row_scale`` float32 ``(tiles, T)``, 1 for
        padding.

    Raises:
        InvalidArgument, NoKernelError: as ``moe_quantize``.
    """
    return torch.ops.nvfp4.moe_quantize_per_token(x, *parts_of(routing), topk_weights, terms)


def moe_gather(x: Tensor, routing: Routing, topk_weights: Tensor | None = None) -> Tensor:
    """Permute tokens into token tiles, for GEMMs of 16-bit activations.

    Args:
        x: bfloat16 or float16 ``(M, K)``.
        routing: routing of the tokens.
        topk_weights: as for ``moe_quantize``.

    Returns:
        ``(tiles, T, K)`` of x's dtype, padding rows zero. Unused tiles are not written.

    Raises:
        InvalidArgument, NoKernelError: as ``moe_quantize``.
    """
    return torch.ops.nvfp4.moe_gather(x, *parts_of(routing), topk_weights)


def check_tokens(x: Tensor, routing: Routing, topk_weights: Tensor | None) -> None:
    """Check tokens against their routing."""
    check_routing(routing)
    check_dtype("x", x, DTYPES)
    check_blocks_of_16("x", x.shape)
    rows = routing.rows.shape[:1] if x.ndim == 2 else routing.slots.shape
    check_shape("x", x, (*rows, x.shape[-1]), "(M, K), or (tiles, T, K), of this routing")
    check_topk_weights(topk_weights, routing.rows)
    if topk_weights is not None and x.ndim == 3:
        raise InvalidArgument(
            "topk_weights: given with rows that lie in tiles, must be None; weigh the tokens "
            "before the first product or the slots after the second"
        )
    check_same_device(x=x, **{f"routing.{n}": t for n, t in routing._asdict().items()})
    if device_arch(x.device) == "cpu":
        check_slots(routing)


def check_topk_weights(topk_weights: Tensor | None, rows: Tensor) -> None:
    """Check optional routing weights."""
    if topk_weights is not None:
        check_dtype("topk_weights", topk_weights, (torch.float32,))
        check_shape("topk_weights", topk_weights, rows.shape, "one weight for each slot")
        check_same_device(rows=rows, topk_weights=topk_weights)


def new_tiles(x: Tensor, slots: Tensor, terms: int) -> tuple[Tensor, Tensor]:
    """Memory for the data and the blocked scales of all tiles."""
    (tiles, rows), k = slots.shape, x.shape[-1]
    data = x.new_empty(data_shape((tiles,), rows, k, terms), dtype=torch.uint8)
    scales = x.new_empty(scales_shape((tiles,), rows, k, terms), dtype=torch.float8_e4m3fn)
    return data, scales


@torch.library.custom_op("nvfp4::moe_quantize", mutates_args=())
def _moe_quantize(
    x: Tensor,
    groups: Tensor,
    slots: Tensor,
    rows: Tensor,
    global_scale: Tensor,
    topk_weights: Tensor | None,
    terms: int,
) -> tuple[Tensor, Tensor]:
    routing = Routing(groups, slots, rows)
    check_tokens(x, routing, topk_weights)
    check_terms("terms", terms)
    check_dtype("global_scale", global_scale, (torch.float32,))
    check_shape("global_scale", global_scale, (), "for one per row use moe_quantize_per_token")
    check_same_device(x=x, global_scale=global_scale)
    kernel = KERNELS.select(x.device, "w4a4").load()
    return kernel(x, routing, global_scale, topk_weights, terms)


@_moe_quantize.register_fake
def _(
    x: Tensor,
    groups: Tensor,
    slots: Tensor,
    rows: Tensor,
    global_scale: Tensor,
    topk_weights: Tensor | None,
    terms: int,
) -> tuple[Tensor, Tensor]:
    return new_tiles(x, slots, terms)


@torch.library.custom_op("nvfp4::moe_quantize_per_token", mutates_args=())
def _moe_quantize_per_token(
    x: Tensor,
    groups: Tensor,
    slots: Tensor,
    rows: Tensor,
    topk_weights: Tensor | None,
    terms: int,
) -> tuple[Tensor, Tensor, Tensor]:
    routing = Routing(groups, slots, rows)
    check_tokens(x, routing, topk_weights)
    check_terms("terms", terms)
    kernel = PER_TOKEN_KERNELS.select(x.device, "w4a4").load()
    return kernel(x, routing, topk_weights, terms)


@_moe_quantize_per_token.register_fake
def _(
    x: Tensor,
    groups: Tensor,
    slots: Tensor,
    rows: Tensor,
    topk_weights: Tensor | None,
    terms: int,
) -> tuple[Tensor, Tensor, Tensor]:
    return (*new_tiles(x, slots, terms), x.new_empty(slots.shape, dtype=torch.float32))


@torch.library.custom_op("nvfp4::moe_gather", mutates_args=())
def _moe_gather(
    x: Tensor, groups: Tensor, slots: Tensor, rows: Tensor, topk_weights: Tensor | None
) -> Tensor:
    routing = Routing(groups, slots, rows)
    check_tokens(x, routing, topk_weights)
    if x.ndim != 2:
        raise InvalidArgument(
            f"x: shape is {tuple(x.shape)}, must be (M, K); rows that lie in tiles need no gather"
        )
    kernel = GATHER_KERNELS.select(x.device, "float").load()
    return kernel(x, routing, topk_weights)


@_moe_gather.register_fake
def _(
    x: Tensor, groups: Tensor, slots: Tensor, rows: Tensor, topk_weights: Tensor | None
) -> Tensor:
    return x.new_empty((*slots.shape, x.shape[-1]))
