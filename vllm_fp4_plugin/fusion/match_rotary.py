"""Matcher for a rotary embedding whose results go to attention and nowhere else."""

from collections.abc import Callable, Iterator, Sequence
from typing import Any

from vllm.model_executor.layers.layernorm import RMSNorm

from nvfp4_kernels.dispatch import Kernel
from nvfp4_kernels.rotary.store.kernels import KERNELS
from nvfp4_kernels.rotary.store.tile import PART
from vllm_fp4_plugin.attention.rotation import Rotation, Unrotated, leave_unnormalised
from vllm_fp4_plugin.device import current_device
from vllm_fp4_plugin.fusion import match_positions
from vllm_fp4_plugin.fusion.forward_analysis import Flow, Parameter, Use, flow_of
from vllm_fp4_plugin.fusion.norm_module import NormOnOurKernel
from vllm_fp4_plugin.fusion.norm_quantize import QuantizingNorm
from vllm_fp4_plugin.fusion.rotary import REPLACED, RotaryOnOurKernel, is_rotary

# Parameters of an embedding's forward, in order; calls with further arguments rotate otherwise.
_PARAMETERS = ("positions", "query", "key")


def rotary_before(owner: Any, name: str) -> tuple[str, Any]:
    """Find the rotary embedding whose results may reach the attention.

    Args:
        owner: fully constructed module that holds both the embedding and the attention.
        name: name of the attention in ``owner``.

    Returns:
        The embedding's name in ``owner`` and the embedding, to be checked by
        ``unsupported_reason``; or an empty name and None.
    """
    for rotary_name, rotary in owner._modules.items():
        if is_rotary(rotary):
            flow = flow_of(owner, rotary_name, "pair", as_input=True)
            if flow.escape or name in flow.consumers:
                return rotary_name, rotary
    return "", None


def kernel_of(attention: Any) -> Kernel | None:
    """Kernel of rotation and cache store for an attention layer, on this process's device.

    None if the device has no such kernel.
    """
    mode = "fp8_kv" if attention.impl.is_fp8 else "float"
    return KERNELS.find(current_device(), mode)  # type: ignore[arg-type]


def unsupported_reason(owners: Sequence[Any], name: str, rotary_name: str) -> str:
    """Reason why attention cannot rotate in place of the rotary embedding; empty if it can.

    Args:
        owners: fully constructed modules, the innermost first; the first holds the embedding and
            the attention.
        name: name of the attention in the first of ``owners``.
        rotary_name: name of the rotary embedding in the first of ``owners``.
    """
    owner = owners[0]
    kind: Any = type(owner)
    attention, rotary = owner._modules[name], owner._modules[rotary_name]
    if type(rotary) not in REPLACED and not isinstance(rotary, RotaryOnOurKernel):
        return f"there is no kernel for {type(rotary).__name__}"
    flows = [flow_of(owner, rotary_name, which, as_input=True) for which in ("pair", "second")]
    otherwise, positions = (
        flows[0].called_otherwise,
        match_positions.unsupported_reason(owners, rotary_name),
    )
    reasons = {
        otherwise: bool(otherwise),
        positions: bool(positions),
        "it is called with more than positions, queries and keys": any(
            sorted(map(_place, call)) != [0, 1, 2] for call in flows[0].arguments
        ),
        f"{_others(flows, name)} reads what it returns": bool(_others(flows, name)),
        "it is called with them in another order": [flow.uses for flow in flows]
        != [frozenset({Use(name, place)}) for place in (0, 1)],
        "its keys are another layer's": attention.impl.kv_sharing_target_layer_name is not None,
        "there is no kernel for it here": kernel_of(attention) is None,
        f"it rotates {rotary.rotary_dim} elements of heads of {rotary.head_size}": (
            rotary.rotary_dim % PART != 0 or rotary.head_size != attention.head_size
        ),
        f"the forward of this {kind.__name__} was replaced": "forward" in vars(owner),
        "its forward was replaced": "forward" in vars(rotary),
        "there are hooks at it": bool(rotary._forward_hooks or rotary._forward_pre_hooks),
    }
    escapes = (flow.escape for flow in flows)
    found = next((escape for escape in escapes if escape), "")
    return found or next((reason for reason, holds in reasons.items() if holds), "")


def _others(flows: Sequence[Flow], name: str) -> str:
    return " and ".join(sorted({each for flow in flows for each in flow.consumers} - {name}))


def _place(parameter: Parameter | None) -> int:
    """Position of one of the embedding's parameters, from position or name; −1 if unknown."""
    named = _PARAMETERS.index(parameter) if parameter in _PARAMETERS else -1
    return parameter if isinstance(parameter, int) else named


def norms_before(owner: Any, rotary_name: str) -> Iterator[tuple[str, Any, int]]:
    """RMSNorms whose only consumer is the rotary embedding: normally per head, not checked here.

    Yields:
        Name, norm, and position of the norm's result in the embedding's arguments: 1 for queries,
        2 for keys.
    """
    for name, norm in owner._modules.items():
        if type(norm) in (RMSNorm, NormOnOurKernel, QuantizingNorm):
            flow = flow_of(owner, name, "result", as_input=True, as_tensor=True)
            for place in (1, 2):
                always = not flow.escape and not flow.called_otherwise
                if always and flow.uses == {Use(rotary_name, place)}:
                    yield name, norm, place


def norms_unsupported_reason(owner: Any, norms: Sequence[tuple[str, Any, int]], rotary: Any) -> str:
    """Reason why attention cannot apply the head norms too; empty if it can.

    ``norms``: see ``norms_before``.
    """
    modules = [norm for _, norm, _ in norms]
    weights = [norm.weight for norm in modules if norm.has_weight]
    reasons = {
        "there are not two": sorted(place for *_, place in norms) != [1, 2],
        "they have no weights of a head": (
            len(weights) != len(modules) or any(w.shape != (rotary.head_size,) for w in weights)
        ),
        "their weights differ in dtype": len({weight.dtype for weight in weights}) > 1,
        "they differ in eps": len({norm.variance_epsilon for norm in modules}) > 1,
        "their variance is of a part": any(n.variance_size_override is not None for n in modules),
        "the forward of one was replaced": any("forward" in vars(norm) for norm in modules),
        "there are hooks at one": any(
            norm._forward_hooks or norm._forward_pre_hooks for norm in modules
        ),
    }
    return next((reason for reason, holds in reasons.items() if holds), "")


def bind(owner: Any, name: str, rotary_name: str) -> str:
    """Fuse rotation, and head norms where possible, into attention.

    Layers may share one rotary embedding: a stand-in replaces it in ``owner``, and only there.

    Args:
        owner: module that holds the attention and the rotary embedding.
        name: name of the attention in ``owner``.
        rotary_name: name of the rotary embedding in ``owner``.

    Returns:
        Note of the fusion, with the reason if the norms stay unfused.
    """
    attention, rotary = owner._modules[name], owner._modules[rotary_name]
    norms = list(norms_before(owner, rotary_name))
    taken: dict[int, Any] = {}
    why_not = norms_unsupported_reason(owner, norms, rotary) if norms else ""
    if norms and not why_not:
        taken = {place: norm for _, norm, place in norms}
        for norm in taken.values():
            leave_unnormalised(norm)
    owner._modules[rotary_name] = Unrotated(rotary)
    rotation = Rotation(rotary, taken.get(1), taken.get(2))
    attention.impl.rotation = rotation
    return f"{rotation.note}, norms of heads apart: {why_not}" if why_not else rotation.note


def unbind(owner: Any, name: str) -> Callable[[], None]:
    """Undo the fusion of rotation and head norms; return a function that fuses again."""
    impl = owner._modules[name].impl
    rotation, impl.rotation = impl.rotation, None
    if rotation is None:
        return lambda: None
    norms = [norm for norm in (rotation.q_norm, rotation.k_norm) if norm is not None]
    for norm in norms:
        del norm.forward
    [(rotary_name, stand_in)] = [
        (each, module)
        for each, module in owner._modules.items()
        if isinstance(module, Unrotated) and module.rotary is rotation.rotary
    ]
    owner._modules[rotary_name] = rotation.rotary

    def undo() -> None:
        impl.rotation, owner._modules[rotary_name] = rotation, stand_in
        for norm in norms:
            leave_unnormalised(norm)

    return undo
