"""Self-check of gate and up projections fused with SiLU-mul."""

from collections.abc import Iterator, Sequence
from typing import Any

from torch import Tensor
from torch.nn import Module

from nvfp4_kernels.gemm.kernels import KERNELS
from vllm_fp4_plugin.arithmetic.choice import Choice
from vllm_fp4_plugin.fusion.gate_up import PROJECTION
from vllm_fp4_plugin.fusion.self_check.neighbourhood import Neighbourhood, product, random_input


def neighbourhoods(model: Module) -> Iterator[Neighbourhood]:
    """Fused gate and up projections of a model."""
    for name, layer in model.named_modules():
        method: Any = getattr(layer, "quant_method", None)
        fused = getattr(getattr(method, "plan", None), "gate_up", False)
        if name.rpartition(".")[2] == PROJECTION and fused and method.apart is None:
            yield _neighbourhood(name, layer)


def _neighbourhood(name: str, layer: Any) -> Neighbourhood:
    method = layer.quant_method
    plan = method.plan

    def results(fused: bool) -> Sequence[Tensor]:
        method.apart = None if fused else _apart(method)
        try:
            return [product(layer, random_input(layer))]
        finally:
            method.apart = None

    def separate() -> None:
        method.apart = _apart(method)

    sizes = tuple(plan.shard_sizes), plan.k, plan.out_terms
    how = *plan.targets, plan.kernel.mode, plan.terms, plan.activation
    return Neighbourhood(f"{name} (with SiLU-mul)", ("mlp", *sizes, *how), results, separate)


def _apart(method: Any) -> tuple[str, str | None]:
    """Targets of the GEMM and quantization kernels that run the two projections unfused.

    Raises:
        TypeError: no such GEMM takes the weight and input as they are.
    """
    plan = method.plan
    choice: Choice = method.choose(KERNELS)
    alike = choice.terms == plan.terms and choice.activation == plan.activation
    alike = alike and choice.kernel.mode == plan.kernel.mode
    if not alike or choice.kernel.weight_layout != plan.kernel.weight_layout:
        raise TypeError("there is no kernel for the projections apart")
    return choice.kernel.target, None if choice.quantizer is None else choice.quantizer.target
