"""Gate and up projection, SiLU and multiplication as one op, without changes to vLLM's models.

vLLM's gated MLPs call ``gate_up_proj(x)`` and pass the result straight to ``SiluAndMul``. Where
this is allowed, the projection returns a ``GateUp``, a deferred result that holds the projection's
input; our ``SiluAndMul`` calls the fused op on a ``GateUp``, and vLLM's code on plain tensors. If
the next layer takes NVFP4 or E4M3 with a calibrated scale, the op returns that: see
``ops.operands``.

Once the model is built, the forward pass and the activation of the module that owns the projection
decide whether the projection may be fused. In doubt it stays unfused, and the report says why.
"""

import sys
from dataclasses import dataclass
from types import FrameType
from typing import Any, NoReturn

import torch
from torch import Tensor
from torch.nn import Module
from torch.nn.functional import silu
from vllm.config import get_current_vllm_config
from vllm.model_executor.custom_op import op_registry_oot
from vllm.model_executor.layers.activation import SiluAndMul
from vllm.model_executor.layers.linear import MergedColumnParallelLinear, RowParallelLinear

from vllm_fp4_plugin.fusion.forward_analysis import Flow, flow_of
from vllm_fp4_plugin.ops.linear import (
    linear,
    silu_mul_linear,
    silu_mul_linear_fp8,
    silu_mul_linear_quantized,
)
from vllm_fp4_plugin.ops.operands import Input, QuantizedInput, operand, shaped
from vllm_fp4_plugin.options import Options

PROJECTION = "gate_up_proj"


@dataclass(frozen=True)
class GateUp:
    """Deferred result of a fused gate and up projection.

    Attributes:
        x: input of the projection, ``(..., K)``.
        layer: the projection.
        n: width I of each projection on this rank.
        kernel: target of the GEMM kernel, see ``ops.linear.SiluMulLinearCall``.
        quantizer: target of the kernel that quantises x; None: x stays in 16 bits.
        terms: number of NVFP4 values whose sum represents each input element.
        consumer: layer that takes ``silu(gate) · up`` quantised; None: the result has x's dtype.
        out_terms: number of NVFP4 values whose sum represents each element of a quantised result;
            1 of E4M3.
        apart: targets of the GEMM and quantization kernels that run two unfused GEMMs; None: fused.
    """

    x: Input
    layer: Any
    n: int
    kernel: str
    quantizer: str | None
    terms: int
    consumer: Any
    out_terms: int
    apart: tuple[str, str | None] | None = None

    def silu_and_mul(self) -> Input:
        """Compute ``silu(gate) · up``: ``(..., I)`` of x's dtype, or a ``QuantizedInput``."""
        x, layer = self.x, self.layer
        if self.apart is not None:
            return self._apart(*self.apart)
        product = (
            *operand(x), layer.weight, layer.weight_scale, layer.alpha, self.n, layer.input_scale,
            self.kernel, self.quantizer, self.terms,
        )  # fmt: skip
        if self.consumer is None:
            return shaped(silu_mul_linear(*product, x.dtype), x)
        scale, terms = self.consumer.input_scale, self.out_terms
        if self.layer.weight_scale.dtype == torch.int32:  # folded: the result is E4M3
            rows = silu_mul_linear_fp8(*product, scale)
            return QuantizedInput(rows, None, None, (*x.shape[:-1], self.n), x.dtype, terms)
        data, scales = silu_mul_linear_quantized(*product, scale, terms)
        return QuantizedInput(data, scales, None, (*x.shape[:-1], self.n), x.dtype, terms)

    def _apart(self, kernel: str, quantizer: str | None) -> Tensor:
        """Compute ``silu(gate) · up`` by two GEMMs, rounded to x's dtype, and torch's SiLU."""
        x, layer = self.x, self.layer
        alpha = layer.alpha.view(2, -1)  # of each projection, or of its rows
        gate, up = (
            linear(
                *operand(x), layer.weight[i], layer.weight_scale[i], alpha[i].clone(), [self.n],
                layer.input_scale, None, kernel, quantizer, self.terms, x.dtype,
            )
            for i in range(2)
        )  # fmt: skip
        return shaped((silu(gate.float()) * up.float()).to(x.dtype), x)

    def __getattr__(self, name: str) -> NoReturn:
        raise AttributeError(
            f"gate_up_proj was fused with its activation, but the model asked its result for "
            f'{name!r}; serve with --additional-config \'{{"nvfp4_tc": {{"fuse_mlp": false}}}}\''
        )


class FusedSiluAndMul(SiluAndMul):
    """``SiluAndMul`` that also takes a ``GateUp``."""

    def forward(self, x: "Tensor | GateUp", *args: Any, **kwargs: Any) -> Input:
        """Compute ``silu(gate) · up`` of a tensor ``(..., 2I)`` or of a ``GateUp``."""
        if isinstance(x, GateUp):
            return x.silu_and_mul()
        return super().forward(x, *args, **kwargs)


def enable() -> None:
    """Replace vLLM's ``SiluAndMul`` with ``FusedSiluAndMul`` for models built from now on.

    The class of another plugin that has replaced ``SiluAndMul`` stays.
    """
    if op_registry_oot.get("SiluAndMul") is None:
        SiluAndMul.register_oot(FusedSiluAndMul)
        # Registration renames the class; custom_ops directives use the original name.
        FusedSiluAndMul.name = SiluAndMul.name


def builders(layer: Module) -> list[Module]:
    """Modules under construction around a layer (``__init__`` on the stack), innermost first."""
    found: list[Module] = []
    frame: FrameType | None = sys._getframe(1)
    while frame is not None:
        code = frame.f_code
        if code.co_name == "__init__" and code.co_argcount:
            module = frame.f_locals.get(code.co_varnames[0])
            if isinstance(module, Module) and module is not layer and module not in found:
                found.append(module)
        frame = frame.f_back
    return found


def unsupported_reason(layer: Any, prefix: str, options: Options) -> str | None:
    """Reason against fusing a layer with SiLU-mul, as far as known while the layer is built.

    Returns:
        Reason for the report; ``""`` if the layer is not a gate and up projection; None if fusion
        is still possible, see ``owner_unsupported_reason``.
    """
    if prefix.rpartition(".")[2] != PROJECTION:
        return ""
    sizes = layer.output_partition_sizes
    reasons = {
        "not fused: switched off (fuse_mlp)": not options.fuse_mlp,
        "not fused: LoRA is enabled": get_current_vllm_config().lora_config is not None,
        "not fused: the projection has a bias": layer.has_bias,
        "not fused: its output is gathered": getattr(layer, "gather_output", False),
        "not fused: it is not a pair of equal column-parallel shards": (
            type(layer) is not MergedColumnParallelLinear or len(sizes) != 2 or sizes[0] != sizes[1]
        ),
        "not fused: another plugin replaces SiluAndMul": (
            op_registry_oot.get("SiluAndMul") is not FusedSiluAndMul
        ),
    }
    return next((reason for reason, holds in reasons.items() if holds), None)


def owner_unsupported_reason(owner: Module | None, layer: Any) -> str | None:
    """Reason against fusing a gate and up projection, found in the owner; None if there is none.

    Args:
        owner: fully constructed module whose forward pass calls the layer; None if unknown.
        layer: the projection.
    """
    projection: Any = None if owner is None else owner._modules.get(PROJECTION)
    if owner is None or projection is not layer:
        return "not fused: the module that calls it is not known"
    name = type(owner).__name__
    if sum(module is layer for _, module in owner.named_modules(remove_duplicate=False)) > 1:
        return f"not fused: {name} holds it under another name too"
    if "forward" in vars(owner):
        return f"not fused: the forward of this {name} was replaced"
    flow = _projected(owner, layer)
    if flow.escape or flow.called_otherwise:
        return f"not fused: {flow.escape or flow.called_otherwise}"
    called: list[Any] = [layer]
    for attribute in sorted(flow.consumers):
        activation = getattr(owner, attribute, None)
        if type(activation) is not FusedSiluAndMul:
            other = type(activation).__name__
            return f"not fused: {name}.{attribute} is {other}, not our SiluAndMul"
        called.append(activation)
    if any(module._forward_hooks or module._forward_pre_hooks for module in called):
        return f"not fused: {name} has hooks at its projection or activation"
    return None


def _projected(owner: Any, layer: Any) -> Flow:
    """Uses of the projection's result in a module's forward pass."""
    return flow_of(owner, PROJECTION, "pair" if layer.return_bias else "result")


def consumer_of(owner: Any, layer: Any) -> tuple[Any, str]:
    """Row-parallel layer that is the sole consumer of the activation's result.

    Args:
        owner: fully constructed module that holds the fused projection, see
            ``owner_unsupported_reason``.
        layer: the projection.

    Returns:
        The layer and an empty reason; or None and the reason why there is no sole consumer.
    """
    name = type(owner).__name__
    activations = sorted(_projected(owner, layer).consumers)
    if len(activations) > 1:
        return None, f"{name} calls {' or '.join(activations)}"
    flow = flow_of(owner, activations[0], "result")
    if flow.escape or flow.called_otherwise:
        return None, flow.escape or flow.called_otherwise
    [attribute, *others] = sorted(flow.consumers)
    found: Any = getattr(owner, attribute, None)
    where = f"{name}.{attribute}"
    if others:
        return None, f"{name} calls {' or '.join(sorted(flow.consumers))} with it"
    if type(found) is not RowParallelLinear or not found.input_is_parallel:
        return None, f"{where} is {type(found).__name__}, not a row-parallel layer of a part each"
    if sum(module is found for _, module in owner.named_modules(remove_duplicate=False)) > 1:
        return None, f"{where} has another name too"
    if "forward" in vars(found):
        return None, f"the forward of {where} was replaced"
    if found._forward_hooks or found._forward_pre_hooks:
        return None, f"{where} has hooks"
    return found, ""
