"""Matcher for a norm whose result goes to one linear layer and nowhere else."""

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from vllm.model_executor.layers.layernorm import RMSNorm

from nvfp4_kernels.device.rowwise.tile import BLOCK, longest_row
from vllm_fp4_plugin.fusion.forward_analysis import Use, flow_of, flow_of_parameter
from vllm_fp4_plugin.fusion.norm_quantize import QuantizingNorm

_LAYERS_PARAMETERS = (0, "input_", "x")  # input of vLLM's linear layers


class NormMatch(NamedTuple):
    """A norm whose result goes to a layer.

    Attributes:
        name: name of the norm in the model.
        norm: the norm; a ``QuantizingNorm`` unless there is a reason against fusion.
        why_not: reason why the norm cannot quantise for the layer; empty if it can.
        owners: modules around the norm, the innermost first.
    """

    name: str
    norm: Any
    why_not: str
    owners: Sequence[Any]


class _Elsewhere(Exception):
    """Signal that the norm's result does not go to the layer, only to others."""


def norm_before(layer: Any, prefix: str, owners: Sequence[Any], on_gpu: bool) -> NormMatch | None:
    """Norm whose result a linear layer consumes, alone or with other consumers; None: no norm.

    Args:
        layer: linear layer of ours, whose input is quantised.
        prefix: name of the layer in the model.
        owners: fully constructed modules around the layer, the innermost first.
        on_gpu: whether the norm will run on a kernel that holds a row in one CTA.
    """
    path = [layer]  # from the layer up to the owner's child
    for place, owner in enumerate(owners):
        names = [name for name, module in owner._modules.items() if module is path[-1]]
        if len(names) != 1:
            return None
        prefix = prefix.removesuffix(names[0]).rstrip(".")
        for name, norm in owner._modules.items():
            if _is_norm(norm):
                flow = flow_of(owner, name, "norm", as_input=True)
                uses = flow.uses or {use for use in flow.despite if use.attribute == names[0]}
                if all(use.attribute != names[0] for use in uses):
                    continue
                try:
                    why_not = _beyond(path, frozenset(uses))
                except _Elsewhere:
                    continue
                why_not = flow.escape or flow.called_otherwise or why_not
                why_not = _unsupported_reason(owner, norm, path, on_gpu) or why_not
                return NormMatch(f"{prefix}.{name}", norm, why_not, owners[place:])
        path.append(owner)
    return None


def _is_norm(module: Any) -> bool:
    """Whether a module is vLLM's ``RMSNorm``, or of a class whose name ends in ``Norm``."""
    return isinstance(module, RMSNorm) or type(module).__name__.endswith("Norm")


def _unsupported_reason(owner: Any, norm: Any, path: Sequence[Any], on_gpu: bool) -> str:
    """Reason why the norm, or a module between norm and layer, rules out fusion; else empty.

    Args:
        owner: module that holds the norm.
        norm: the norm.
        path: see ``_beyond``.
        on_gpu: see ``norm_before``.
    """
    if type(norm) is not QuantizingNorm:
        return f"it is {type(norm).__name__}, not our RMSNorm"
    k, most = norm.hidden_size, longest_row(words=BLOCK)
    dtypes = (path[0].params_dtype, torch.float32)
    if norm.variance_size_override is not None:
        return f"its variance is of {norm.variance_size_override} elements of {k}"
    if not norm.has_weight or norm.weight.dtype not in dtypes:
        return f"its weight is {norm.weight.dtype if norm.has_weight else 'missing'}"
    if k % BLOCK or (on_gpu and k > most):
        return f"its rows have {k} elements, must be a multiple of {BLOCK} and at most {most}"
    if sum(m is norm for _, m in owner.named_modules(remove_duplicate=False)) > 1:
        return f"{type(owner).__name__} holds it under another name too"
    for module in (owner, norm, *path):
        if "forward" in vars(module):
            return f"the forward of this {type(module).__name__} was replaced"
    for module in (norm, *path):
        if module._forward_hooks or module._forward_pre_hooks:
            return f"there are hooks at this {type(module).__name__}"
    return ""


def _beyond(path: Sequence[Any], uses: frozenset[Use]) -> str:
    """Reason why the forward passes between norm and layer prevent fusion; empty if none does.

    Args:
        path: the layer, the module that holds it, and so on up to the module that the norm's
            owner calls with the norm's result.
        uses: calls that take the norm's result.

    Raises:
        _Elsewhere: the norm's result does not reach the layer.
    """
    called = path[-1]
    for below, module in zip(path[-2::-1], path[:0:-1], strict=True):
        if len(uses) > 1:
            break
        [use] = uses
        flow = flow_of_parameter(module, use.parameter)
        if flow.escape or flow.called_otherwise:
            return flow.escape or flow.called_otherwise
        uses, called = flow.uses, below
        if all(module._modules.get(use.attribute) is not below for use in uses):
            raise _Elsewhere
    if len(uses) > 1:
        names = sorted({use.attribute for use in uses})
        return f"{' and '.join(names)} read it"
    [use] = uses
    if called is path[0] and use.parameter not in _LAYERS_PARAMETERS:
        return f"the layer is called with it as {use.parameter}"
    return ""
