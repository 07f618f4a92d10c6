"""Kernels that an MoE layer needs, for any number of tokens. Imports no CuTe."""

from collections.abc import Iterator
from dataclasses import dataclass, replace

from nvfp4_kernels.formats.fp8_rows import padded
from nvfp4_kernels.formats.terms import TermLayout
from nvfp4_kernels.gemm.grouped.tile_tokens import tile_tokens
from nvfp4_kernels.gemm.sm90 import choose_fp8 as fp8_sm90
from nvfp4_kernels.gemm.sm90 import choose_grouped as sm90
from nvfp4_kernels.gemm.sm90.tile import EpilogueConfig as EpilogueSm90
from nvfp4_kernels.gemm.sm100 import choose_grouped as sm100
from nvfp4_kernels.gemm.sm100.tile import EpilogueConfig as EpilogueSm100
from nvfp4_kernels.moe.routing import max_tiles
from nvfp4_kernels.precompile.experts_layer import Experts
from nvfp4_kernels.precompile.experts_rows import row_specs
from nvfp4_kernels.precompile.linear_sm90 import weight_only_spec
from nvfp4_kernels.precompile.linear_sm100 import product_spec
from nvfp4_kernels.precompile.spec import KernelSpec


@dataclass(frozen=True)
class _Grouped:
    """Grouped GEMM of a batch.

    Attributes:
        tiles: maximum number of token tiles.
        tile_tokens: rows of a token tile.
        n, k: rows of a weight, and elements per row.
        weights: number of weights per expert: 2 for gate and up, else 1.
        is_first: whether this is gemm1.
    """

    tiles: int
    tile_tokens: int
    n: int
    k: int
    weights: int
    is_first: bool


def experts_kernels(
    experts: Experts, family: str, *, max_tokens: int, sms: int
) -> dict[KernelSpec, list[str]]:
    """Every kernel of an MoE layer, with the parts of the layer that the kernel serves.

    Args:
        experts: the MoE layer.
        family: family of the GPU's architecture: ``"sm_90"`` or ``"sm_100"``.
        max_tokens: maximum number of tokens in a batch; all numbers from 1 on are covered.
        sms: SMs of the GPU.
    """
    spec = {"sm_90": _spec_sm90, "sm_100": _spec_sm100}[family]
    found: dict[KernelSpec, list[str]] = {}
    for product in dict.fromkeys(_products(experts, family, max_tokens, sms)):
        users = found.setdefault(spec(experts, product, sms), [])
        name = "w13" if product.is_first else "w2"
        if name not in users:
            users.append(name)
    for tokens in range(1, max_tokens + 1):
        rows = tile_tokens(family, tokens, experts.top_k, experts.sizes, sms)
        for name, row_spec in row_specs(experts, tokens, rows, sms):
            found.setdefault(row_spec, [name])
    return found


def _products(experts: Experts, family: str, max_tokens: int, sms: int) -> Iterator[_Grouped]:
    h, i, held, _, gated = sizes = experts.sizes
    for tokens in range(1, max_tokens + 1):
        rows = tile_tokens(family, tokens, experts.top_k, sizes, sms)
        tiles = max_tiles(tokens * experts.top_k, held, rows)
        yield _Grouped(tiles, rows, i, h, 1 + gated, is_first=True)
        yield _Grouped(tiles, rows, h, i, 1, is_first=False)


def _is_routed_before(experts: Experts, product: _Grouped) -> bool:
    """Whether the preceding launch is a GEMM of the same routing, not a quantiser."""
    return not product.is_first and not experts.is_per_token


def _spec_sm90(experts: Experts, product: _Grouped, sms: int) -> KernelSpec:
    activation = experts.activation if product.is_first else None
    to_fp8 = product.is_first and experts.inputs == "fp8-static"
    k = padded(product.k) if experts.is_fp8 else product.k
    output = EpilogueSm90(
        act="float8_e4m3fn" if experts.is_fp8 else experts.dtype,
        dtype="float8_e4m3fn" if to_fp8 else experts.dtype,
        per_token=experts.inputs == "fp8-per-token",
        bias=experts.dtype if experts.bias else "",
        activation=activation,
    )
    problem = sm90.GroupedProblem(
        product.tiles, product.tile_tokens, experts.sizes.held, product.n, k,
        product.weights, experts.sizes.total,
    )  # fmt: skip
    choose = (fp8_sm90 if experts.is_fp8 else sm90).choose_grouped_config
    tile, output = choose(problem, output, sms)
    tile = replace(tile, routed_before=_is_routed_before(experts, product))
    return weight_only_spec("grouped_gemm", tile, output)


def _spec_sm100(experts: Experts, product: _Grouped, sms: int) -> KernelSpec:
    to_nvfp4 = product.is_first and experts.inputs == "static"
    output = EpilogueSm100(
        "nvfp4" if to_nvfp4 else experts.dtype,
        bias=experts.dtype if experts.bias else "",
        row_scale=experts.inputs == "per-token",
        terms=TermLayout.of(experts.terms if to_nvfp4 else 1, product.tile_tokens),
        activation=experts.activation if product.is_first else None,
    )
    problem = sm100.GroupedProblem(
        product.tile_tokens, product.n, product.k, product.tiles, experts.sizes.held,
        product.weights, experts.terms,
    )  # fmt: skip
    tile, output = sm100.choose_grouped(problem, output, sms)
    return product_spec(
        "grouped_gemm", replace(tile, routed_before=_is_routed_before(experts, product)), output
    )
