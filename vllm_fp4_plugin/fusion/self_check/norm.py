"""Self-check of norms that quantise for a linear layer."""

from collections.abc import Iterator, Sequence
from typing import Any

from torch import Tensor
from torch.nn import Module

from vllm_fp4_plugin.fusion.norm_quantize import QuantizingNorm
from vllm_fp4_plugin.fusion.self_check.neighbourhood import Neighbourhood, product, random_rows


def neighbourhoods(model: Module) -> Iterator[Neighbourhood]:
    """Norms of a model, each with the layer that consumes its quantised result."""
    for name, norm in model.named_modules():
        if type(norm) is QuantizingNorm and norm.feeding is not None:
            yield _neighbourhood(name, norm)


def _neighbourhood(name: str, norm: Any) -> Neighbourhood:
    feeding = norm.feeding
    plan, layer = feeding.layer.quant_method.plan, feeding.layer

    def results(fused: bool) -> Sequence[Tensor]:
        x, residual = (random_rows(norm.weight, plan.k, seed=seed) for seed in (0, 1))
        x, residual = x.to(layer.params_dtype), residual.to(layer.params_dtype)
        norm.feeding = feeding if fused else None
        try:
            alone = norm(x.clone())
            added, total = norm(x.clone(), residual.clone())
        finally:
            norm.feeding = feeding
        return product(layer, alone), product(layer, added), total

    def separate() -> None:
        norm.feeding = None
        if feeding.reduction is not None:
            feeding.reduction.producer.quant_method.keep_part(feeding.reduction.producer)

    # Layers differ only in their weights.
    sizes = tuple(plan.shard_sizes), plan.k, norm.weight.dtype, norm.variance_epsilon
    how = *plan.targets, plan.terms, plan.activation, feeding.alone, feeding.adding
    return Neighbourhood(f"{name} (quantises)", ("norm", *sizes, *how), results, separate)
