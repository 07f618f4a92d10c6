"""Rounding of the inputs of a served 16-bit model's linears to NVFP4 terms or E4M3 and back."""

from typing import Any

from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from examples.accuracy.variants import InputFormat
from nvfp4_kernels.formats.fp8_rows import from_rows, quantize_fp8, token_scales
from nvfp4_kernels.formats.nvfp4 import row_global_scales
from nvfp4_kernels.formats.terms import decode_terms, quantize_terms


class ActivationRounder:
    """Extension of vLLM's worker that rounds activations of a model in eager mode."""

    model_runner: Any  # the worker's own

    rounding: list[RemovableHandle] | None = None

    def round_activations(self, input_format: InputFormat = 1) -> int:
        """Round the inputs of all linears in layers to ``input_format`` from now on.

        The scale is per token. An earlier call's hooks are removed. In a dense model, the linears
        in layers are those that the quantising tool selects.

        Returns:
            Number of linears with rounded inputs.

        Raises:
            RuntimeError: the model is compiled, so that its layers' hooks do not run.
        """
        from vllm.model_executor.layers.linear import LinearBase

        if not self.model_runner.model_config.enforce_eager:
            raise RuntimeError(
                "activations: cannot be rounded in a compiled model; serve it with --enforce-eager"
            )
        for hook in self.rounding or ():
            hook.remove()
        self.rounding = round_inputs(self.model_runner.model, LinearBase, input_format)
        return len(self.rounding)


def round_inputs(
    model: nn.Module, linear: type[nn.Module], input_format: InputFormat = 1
) -> list[RemovableHandle]:
    """Round the input of every ``linear`` in the layers of ``model`` to ``input_format``.

    Layers are the members of ``nn.ModuleList``. Returns the handles of the hooks, one per linear.
    """
    modules = dict(model.named_modules())
    stacks = tuple(f"{name}." for name, m in modules.items() if isinstance(m, nn.ModuleList))
    chosen = [m for name, m in modules.items() if isinstance(m, linear) and name.startswith(stacks)]

    def round_input(module: nn.Module, args: tuple[Any, ...]) -> tuple[Any, ...]:
        x, *others = args
        return (rounded(x, input_format), *others)

    return [module.register_forward_pre_hook(round_input) for module in chosen]


def rounded(x: Tensor, input_format: InputFormat = 1) -> Tensor:
    """Round ``x`` ``(…, tokens, K)`` to a sum of NVFP4 terms, or to E4M3.

    The scale, of E4M3 or of all terms, is per token. Returns a tensor of ``x``'s shape and dtype.
    """
    if input_format == "fp8":
        scale = token_scales(x)
        values = from_rows(quantize_fp8(x, scale), x.shape[-1]).float()
    else:
        scale = row_global_scales(x)
        values = decode_terms(*quantize_terms(x, scale, input_format), input_format)
    return (values * scale[..., None]).to(x.dtype)
