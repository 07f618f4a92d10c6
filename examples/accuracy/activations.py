"""Rounding the inputs of a served 16-bit model's linears to NVFP4 and back."""

from typing import Any

from torch import Tensor, nn

from nvfp4_kernels.nvfp4 import Nvfp4Tensor, quantize_activation, row_global_scales


class ActivationRounder:
    """Part of vLLM's worker, of a model in eager mode."""

    model_runner: Any  # the worker's own

    def round_activations(self) -> int:
        """Round them from now on, with a scale for each token; returns the number of linears.

        Those are the linears of the decoder layers, as those that our tool quantises.

        Raises:
            RuntimeError: the model is compiled, and its layers' hooks do not run.
        """
        from vllm.model_executor.layers.linear import LinearBase

        if not self.model_runner.model_config.enforce_eager:
            raise RuntimeError(
                "activations: cannot be rounded in a compiled model; serve it with --enforce-eager"
            )
        return round_inputs(self.model_runner.model, LinearBase)


def round_inputs(model: nn.Module, linear: type[nn.Module]) -> int:
    """Round what every ``linear`` of the layers of ``model`` gets; returns how many there are."""
    modules = dict(model.named_modules())
    stacks = tuple(f"{name}." for name, m in modules.items() if isinstance(m, nn.ModuleList))
    chosen = [m for name, m in modules.items() if isinstance(m, linear) and name.startswith(stacks)]
    for module in chosen:
        module.register_forward_pre_hook(_round_input)
    return len(chosen)


def _round_input(module: nn.Module, args: tuple[Any, ...]) -> tuple[Any, ...]:
    x, *others = args
    return (rounded(x), *others)


def rounded(x: Tensor) -> Tensor:
    """``x`` ``(tokens, K)`` rounded to NVFP4 and back, each token by a global scale of its own."""
    scale = row_global_scales(x)
    data, scales = quantize_activation(x, scale)
    return Nvfp4Tensor(data, scales, scale).dequantize(x.dtype)
