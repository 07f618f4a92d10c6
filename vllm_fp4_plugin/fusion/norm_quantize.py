"""RMSNorms that quantise for their only consumer, without changes to vLLM's models.

vLLM builds our class instead of vLLM's ``RMSNorm``. A norm acts like vLLM's until, once the model
is built, a linear layer of ours turns out to be the only consumer of the norm's result: see
``match_norm``. From then on the norm normalises and quantises in one launch, by the layer's own
scale or a scale per token. On several ranks the norm may first all-reduce its input: see
``Reduction``.
"""

from dataclasses import dataclass
from typing import Any

from torch import Tensor
from vllm.config import VllmConfig
from vllm.model_executor.custom_op import op_registry_oot

from nvfp4_kernels.dispatch import Kernel
from nvfp4_kernels.quantize.rms_norm.arguments import Form
from nvfp4_kernels.quantize.rms_norm.kernels import KERNELS
from vllm_fp4_plugin import batch_invariance
from vllm_fp4_plugin.device import current_device
from vllm_fp4_plugin.fusion.norm_module import NormOnOurKernel, put_in_place
from vllm_fp4_plugin.ops.all_reduce import all_reduce_add_rms_norm_quantize
from vllm_fp4_plugin.ops.norm import norm_op
from vllm_fp4_plugin.ops.operands import Input, QuantizedInput, Unreduced


@dataclass(frozen=True)
class Reduction:
    """All-reduce of a layer's partial sums inside the norm that consumes the layer's result.

    Attributes:
        tokens: maximum number of tokens for flashinfer's fused all-reduce and norm; 0: never used.
        width: capacity of flashinfer's workspace in elements per token.
        producer: row-parallel layer that returns its rank's partial sum.
    """

    tokens: int
    width: int
    producer: Any


@dataclass(frozen=True)
class Feeding:
    """Consumer of a norm's result, with the kernels that quantise for it.

    Attributes:
        layer: the consuming linear layer.
        per_token: whether each token gets its own scale, instead of the layer's scale.
        terms: number of NVFP4 values whose sum represents each element of the result; 1 of E4M3.
        alone, adding: kernels of the norm, without and with a residual.
        reduction: how the norm all-reduces the ranks' partial sums; None: the norm's input is
            already reduced.
    """

    layer: Any
    per_token: bool
    terms: int
    alone: Kernel
    adding: Kernel
    reduction: Reduction | None = None

    def form(self, adds: bool) -> Form:
        """Form of the norm's op; ``adds``: with a residual."""
        return Form(adds, self.per_token, self.adding.mode == "w4a8")


class QuantizingNorm(NormOnOurKernel):
    """``RMSNorm`` that may quantise its result.

    Attributes:
        feeding: consumer of the quantised result; None: the norm acts like its base class.
    """

    feeding: Feeding | None = None

    def forward(self, x: "Tensor | Unreduced", *args: Any, **kwargs: Any) -> Any:
        """See ``RMSNorm.forward_native``.

        ``x`` may be an ``Unreduced``, and the normalised result a ``QuantizedInput``.
        """
        if isinstance(x, Unreduced):
            return self._reduced(x, *args, **kwargs)
        if self.feeding is None:
            return super().forward(x, *args, **kwargs)
        return self._quantized(self.feeding, x, *args, **kwargs)

    def _quantized(
        self, feeding: Feeding, x: Tensor, residual: Tensor | None = None
    ) -> "Input | tuple[Input, Tensor]":
        kernel = feeding.alone if residual is None else feeding.adding
        rows = [each for each in (x, residual) if each is not None]
        if x.ndim != 2:
            rows = [each.reshape(-1, each.shape[-1]) for each in rows]
        form = feeding.form(adds=residual is not None)
        scale = [] if feeding.per_token else [feeding.layer.input_scale]
        terms = [] if form.fp8 else [feeding.terms]
        found = norm_op(form.name)(
            *rows, self.weight.data, self.variance_epsilon, *scale, *terms, kernel.target
        )
        data, *further = (found,) if isinstance(found, Tensor) else found
        scales = None if form.fp8 else further.pop(0)
        row_scale = further[0] if feeding.per_token else None
        quantized = QuantizedInput(data, scales, row_scale, tuple(x.shape), x.dtype, feeding.terms)
        return quantized if residual is None else (quantized, further[-1].view(x.shape))

    def _reduced(
        self, x: Unreduced, residual: Tensor | None = None
    ) -> tuple[QuantizedInput, Tensor]:
        feeding = self.feeding
        if residual is None or feeding is None or feeding.reduction is None:
            x.refuse()
        layer, reduction = feeding.layer, feeding.reduction
        total = x.partial.reshape(-1, x.shape[-1])
        data, scales = all_reduce_add_rms_norm_quantize(
            total, residual.reshape(total.shape), self.weight.data, self.variance_epsilon,
            layer.input_scale, layer.input_scale_reciprocal, feeding.terms, feeding.adding.target,
            reduction.tokens, reduction.width,
        )  # fmt: skip
        quantized = QuantizedInput(data, scales, None, tuple(x.shape), x.dtype, feeding.terms)
        return quantized, total.view(x.shape)


def enable() -> None:
    """Replace vLLM's ``RMSNorm`` with ``QuantizingNorm`` for models built from now on.

    On a device without norm kernels that quantise, vLLM's class stays in place.
    """
    if any(kernels(per_token=False, fp8=fp8) is not None for fp8 in (False, True)):
        put_in_place(QuantizingNorm)


def kernels(per_token: bool, fp8: bool) -> tuple[Kernel, Kernel] | None:
    """Kernels of a quantising norm on this process's device: without and with a residual.

    None if either is missing. ``per_token``: see ``Feeding``; ``fp8``: whether to quantise to E4M3.
    """
    device, wanted = current_device(), batch_invariance.is_wanted()
    forms = [Form(adds, per_token, fp8) for adds in (False, True)]
    alone, adding = (KERNELS[form].find(device, form.mode, wanted) for form in forms)
    return None if alone is None or adding is None else (alone, adding)


def unsupported_reason(vllm_config: VllmConfig, switched_on: bool) -> str | None:
    """Reason why no norm of an engine may quantise; None if there is none.

    ``switched_on``: the user's option ``fuse_norm``.
    """
    reasons = {
        "switched off (fuse_norm)": not switched_on,
        "LoRA is enabled": vllm_config.lora_config is not None,
        "another plugin replaces RMSNorm": op_registry_oot.get("RMSNorm") is not QuantizingNorm,
    }
    return next((reason for reason, holds in reasons.items() if holds), None)
