"""A model that temporarily computes with values rounded to NVFP4."""

from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

from torch import Tensor, nn

from nvfp4_kernels.formats.nvfp4 import Nvfp4Tensor
from nvfp4_kernels.formats.scale_search import SCALE_RULES, ScaleRule, quantize_with_rule
from nvfp4_kernels.formats.terms import decode_terms, quantize_terms


def quantise_weights(
    model: nn.Module,
    linears: Iterable[str],
    rule: ScaleRule,
    on_linear: Callable[[], None] = lambda: None,
) -> tuple[dict[str, Nvfp4Tensor], dict[str, dict[str, float]]]:
    """Quantise each linear's weight as the quantising tool does.

    Args:
        model: model with the linears.
        linears: names of the linears.
        rule: rule of the block scales of the returned weights.
        on_linear: called after each linear.

    Returns:
        The weights quantised by ``rule``; and, for each linear, ‖dequantised - original‖² by every
        rule, and ‖original‖² as ``energy``.
    """
    weights, errors = {}, {}
    for name in linears:
        weight: Tensor = model.get_submodule(name).get_parameter("weight").data
        errors[name] = {"energy": float(weight.double().square().sum())}
        for each in SCALE_RULES:
            packed = quantize_with_rule(weight, each)  # type: ignore[arg-type]
            difference = packed.dequantize() - weight
            errors[name][each] = float(difference.double().square().sum())
            if each == rule:
                weights[name] = packed
        on_linear()
    return weights, errors


@contextmanager
def fake_quantised(
    model: nn.Module,
    linears: Iterable[str],
    weights: Mapping[str, Nvfp4Tensor],
    input_scales: Mapping[str, Tensor],
    terms: int = 1,
) -> Iterator[None]:
    """Context in which ``linears`` compute with dequantised weights and inputs.

    Args:
        model: model with the linears, without gradients.
        linears: names of the linears.
        weights: quantised weights, by linear.
        input_scales: float32 ``()`` by linear; inputs of a linear without a scale are not rounded.
        terms: number of NVFP4 terms that inputs are rounded to.
    """
    changed: list[tuple[Any, Tensor, Any]] = []
    try:
        for name in linears:
            module: Any = model.get_submodule(name)
            scale = input_scales.get(name)
            hook = None
            if scale is not None:
                hook = module.register_forward_pre_hook(_quantise_input(scale, terms))
            changed.append((module, module.weight.data, hook))
            module.weight.data = weights[name].dequantize(module.weight.dtype)
        yield
    finally:
        for module, original, hook in changed:
            module.weight.data = original
            if hook is not None:
                hook.remove()


def _quantise_input(
    scale: Tensor, terms: int
) -> Callable[[nn.Module, tuple[Tensor, ...]], tuple[Tensor]]:
    def quantise(module: nn.Module, args: tuple[Tensor, ...]) -> tuple[Tensor]:
        data, scales = quantize_terms(args[0], scale, terms)
        return ((decode_terms(data, scales, terms) * scale).to(args[0].dtype),)

    return quantise
