"""Attention that quantises its result for its only consumer.

Plugins cannot replace vLLM's ``Attention``, but the class of a built layer can be changed:
``QuantizingAttention`` only adds a forward pass, which calls vLLM's op
``unified_attention_with_output`` with the scale arguments that vLLM's own fusion pass also sets.
"""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from vllm.model_executor.layers.attention import Attention
from vllm.model_executor.layers.attention.attention import (
    _encode_layer_name,
    unified_attention_with_output,
)
from vllm.model_executor.layers.linear import RowParallelLinear

from nvfp4_kernels.attention.kernels import PAGED_KERNELS
from nvfp4_kernels.dispatch import Kernel
from nvfp4_kernels.formats.nvfp4_rows import HEAD_COLUMNS, ROW_COLUMNS, new_nvfp4_rows
from nvfp4_kernels.runtime.recording import is_listened_to
from vllm_fp4_plugin import batch_invariance
from vllm_fp4_plugin.device import current_device
from vllm_fp4_plugin.fusion.forward_analysis import flow_of
from vllm_fp4_plugin.ops.operands import QuantizedInput


class QuantizingAttention(Attention):
    """``Attention`` whose result is NVFP4, quantised with the input scale of the consuming layer.

    Attributes:
        feeding: the consuming layer, in a tuple so that it is not registered as a submodule.
    """

    feeding: tuple[Any]

    def forward(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        output_shape: torch.Size | None = None,
        output_dtype: torch.dtype | None = None,
    ) -> Any:
        """Compute attention; return a ``QuantizedInput`` of shape ``(T, Hq·D)``.

        Args:
            query: 16-bit ``(T, Hq·D)``.
            key: 16-bit ``(T, Hkv·D)``, or None if another layer stores the keys.
            value: as ``key``.
            output_shape: must be None; heads are always concatenated.
            output_dtype: must be None; the dtype is always the query's.

        Raises:
            ValueError: ``output_shape`` or ``output_dtype`` is given.
        """
        for name, given in (("output_shape", output_shape), ("output_dtype", output_dtype)):
            if given is not None:
                raise ValueError(
                    f"{self.layer_name}: {name} is {given}, must be None where attention quantises "
                    'its result; serve with --additional-config \'{"nvfp4_tc": {"fuse_attention": '
                    "false}}'"
                )
        heads = query.view(-1, self.num_heads, self.head_size)
        keys, values = (
            None if x is None else x.view(-1, self.num_kv_heads, self.head_size)
            for x in (key, value)
        )
        data, scales = new_nvfp4_rows(heads)
        [layer] = self.feeding
        quantized = {"output_scale": layer.input_scale, "output_block_scale": scales}
        if self.use_direct_call or not is_listened_to():  # this function is the op itself
            unified_attention_with_output(heads, keys, values, data, self.layer_name, **quantized)
        else:
            name = _encode_layer_name(self.layer_name)
            torch.ops.vllm.unified_attention_with_output(
                heads, keys, values, data, name, **quantized
            )
        shape = len(heads), self.num_heads * self.head_size
        return QuantizedInput(data.flatten(1), scales, None, shape, query.dtype, 1)


def feeds(owner: Any, name: str, layer: Any) -> bool:
    """Whether a linear layer consumes an attention layer's result, alone or with other consumers.

    False if the attention layer already quantises, or is of a subclass of vLLM's ``Attention``.

    Args:
        owner: fully constructed module that holds the attention and the linear layer.
        name: name of the attention in ``owner``.
        layer: linear layer of ours.
    """
    names = [n for n, each in owner._modules.items() if each is layer]
    plain = type(owner._modules[name]) is Attention
    return plain and len(names) == 1 and names[0] in flow_of(owner, name, "result").consumers


def unsupported_reason(owner: Any, name: str, attention: Any, layer: Any) -> str:
    """Reason why an attention layer cannot quantise for a linear layer; empty if it can.

    Args:
        owner: module that holds the attention and the linear layer.
        name: name of the attention in ``owner``.
        attention: attention whose result the linear layer consumes, see ``feeds``.
        layer: the linear layer; all other fusions of this layer are resolved.
    """
    plan, kind = layer.quant_method.plan, type(owner)
    width = attention.num_heads * attention.head_size
    flow = flow_of(owner, name, "result")
    readers = sorted(flow.consumers)
    reasons = {
        f"{' and '.join(readers)} read it": len(readers) > 1,
        flow.called_otherwise: bool(flow.called_otherwise),
        "it has a scale per token": plan.activation != "static",
        f"its input has {plan.terms} terms": plan.terms != 1,
        f"D is {attention.head_size}, no multiple of {HEAD_COLUMNS}": (
            attention.head_size % HEAD_COLUMNS != 0
        ),
        f"its rows have {width} elements, no multiple of {ROW_COLUMNS}": width % ROW_COLUMNS != 0,
        "it is no row-parallel layer of a part each": (
            type(layer) is not RowParallelLinear or not layer.input_is_parallel or plan.k != width
        ),
        f"the forward of this {kind.__name__} was replaced": "forward" in vars(owner),
        "there are hooks at it": any(
            m._forward_hooks or m._forward_pre_hooks for m in (attention, layer)
        ),
        "its forward was replaced": any("forward" in vars(m) for m in (attention, layer)),
        f"{kind.__name__} holds it under another name too": (
            sum(m in (attention, layer) for _, m in owner.named_modules(remove_duplicate=False)) > 2
        ),
        "there is no kernel for it here": kernel_of(attention) is None,
    }
    return next((reason for reason, holds in reasons.items() if holds), "")


def kernel_of(attention: Any) -> Kernel | None:
    """Kernel for an attention layer that quantises, on this process's device; None: no kernel."""
    mode = "fp8_kv" if attention.impl.is_fp8 else "float"
    wanted = batch_invariance.is_wanted()
    return PAGED_KERNELS.find(current_device(), mode, wanted)  # type: ignore[arg-type]


def hand_over(attention: Any, layer: Any) -> Kernel:
    """Make an attention layer quantise its result for ``layer``; return attention's kernel."""
    kernel = kernel_of(attention)
    assert kernel is not None
    attention.__class__ = QuantizingAttention
    attention.feeding = (layer,)
    attention.impl.quantizes = True
    return kernel


def take_back(attention: Any) -> Callable[[], None]:
    """Make an attention layer return 16 bits again; return a function that restores the fusion."""
    if not attention.impl.quantizes:
        return lambda: None
    attention.__class__, attention.impl.quantizes = Attention, False

    def undo() -> None:
        attention.__class__, attention.impl.quantizes = QuantizingAttention, True

    return undo
