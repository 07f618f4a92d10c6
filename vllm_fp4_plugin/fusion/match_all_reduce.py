"""Matcher for a row-parallel layer whose result goes to a norm and nowhere else."""

from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

from torch.nn import ModuleList
from vllm.model_executor.layers.linear import RowParallelLinear
from vllm.model_executor.models.interfaces import EagleModelMixin
from vllm.model_executor.models.utils import PPMissingLayer

from vllm_fp4_plugin.fusion.forward_analysis import (
    ALONE,
    RETURNED,
    Flow,
    Returns,
    Use,
    flow_of,
    flow_of_layers,
    flow_of_parameter,
)

RESIDUAL = "residual"  # name in vLLM's models; None for the first layer only
_AUXILIARY = "_maybe_add_hidden_state"  # method of EagleModelMixin
# Speculation methods whose draft reads values between the target's layers.
READS_BETWEEN = frozenset({"custom_class", "dflash", "dspark", "eagle3", "extract_hidden_states"})


class Producer(NamedTuple):
    """A row-parallel layer before a norm.

    Attributes:
        layer: the layer; None if there is none.
        why_not: reason why the norm cannot all-reduce the layer's result; empty if it can.
    """

    layer: Any
    why_not: str


class _Source(NamedTuple):
    """Submodule of an owner.

    Attributes:
        name: name in the owner.
        module: the submodule.
        layer: row-parallel layer whose result the submodule returns, maybe the submodule itself;
            None: no such layer.
        returns: return convention of the submodule.
        escape: reason, if known, why ``layer`` is None although the submodule holds a row-parallel
            layer.
    """

    name: str
    module: Any
    layer: Any
    returns: Returns
    escape: str = ""


def producer_before(owners: Sequence[Any], norm_name: str, reads_between: bool) -> Producer:
    """Find the layer whose result a norm adds to the residual.

    Args:
        owners: fully constructed modules, the innermost first; the first holds the norm.
        norm_name: name of the norm in the first of ``owners``.
        reads_between: whether a draft model reads values between decoder layers.
    """
    owner = owners[0]
    feeding = list(_feeding(owner, norm_name))
    if not feeding and _takes_input(owner, norm_name):
        return _across(owners, norm_name, reads_between)
    if not feeding:
        return Producer(None, _escape(owner) or "what comes before it is not known")
    [(source, flow), *others] = feeding
    if others or source.layer is None:
        return Producer(None, _not_one(feeding))
    return _producer(source, owners[:1], owners[-1], _in_the_way(flow, norm_name))


def _feeding(owner: Any, consumer: str) -> Iterator[tuple[_Source, Flow]]:
    """Submodules of an owner whose results go to ``consumer``, each with the result's flow.

    ``consumer``: attribute of the owner, or ``RETURNED``.
    """
    for source in _sources(owner):
        flow = flow_of(owner, source.name, source.returns, True, may_return=True)
        if consumer in flow.consumers:
            yield source, flow


def _takes_input(owner: Any, norm_name: str) -> bool:
    """Whether a norm is called with one of the first three parameters of the owner's forward."""
    given = frozenset({RESIDUAL})
    return any(norm_name in flow_of_parameter(owner, p, given).consumers for p in range(3))


def _escape(owner: Any) -> str:
    """First escape, in an owner, of a submodule's result; empty if there is none.

    Only row-parallel layers, and submodules that hold others, such as attention or MLPs, count.
    """
    for source in _sources(owner):
        if source.layer is not None or source.module._modules:
            flow = flow_of(owner, source.name, source.returns, True, may_return=True)
            if flow.escape:
                return flow.escape
    return ""


def _not_one(feeding: Sequence[tuple[_Source, Flow]]) -> str:
    names = [f"{source.name} ({type(source.module).__name__})" for source, _ in feeding]
    if len(names) > 1:
        return f"{' and '.join(names)} feed it"
    escape = feeding[0][0].escape
    return escape or f"{names[0]} returns no row-parallel layer's result"


def _across(owners: Sequence[Any], norm_name: str, reads_between: bool) -> Producer:
    """Find the producer in the previous decoder layer, for a norm of a decoder layer's input."""
    owner, *outer = owners
    lists = [
        (model, name, list(layers))
        for model in outer[:1]
        for name, layers in model._modules.items()
        if isinstance(layers, ModuleList) and any(each is owner for each in layers)
    ]
    if not lists:
        return Producer(None, "what comes before it is not known")
    [(model, name, layers), *_] = lists
    place = next(place for place, each in enumerate(layers) if each is owner)
    before = layers[place - 1] if place else None
    if before is None or isinstance(before, PPMissingLayer):
        return Producer(None, "no decoder layer of this rank comes before it")
    ending = list(_feeding(before, RETURNED))
    if not ending:
        return Producer(None, f"what {type(before).__name__} returns is not known")
    [(source, flow), *others] = ending
    if others or source.layer is None:
        return Producer(None, _not_one(ending))
    pair = Use(RETURNED, 0) in flow.uses
    between = flow_of_layers(model, name, "pair" if pair else "result")
    calls = {use for use in between.uses if use.attribute == name}
    rest = between.uses - calls
    noted = {use for use in rest if _is_auxiliary(model, use)}
    inside = Flow(frozenset(), "it is not called with it")
    if len(calls) == 1:
        [call] = calls
        inside = flow_of_parameter(owner, call.parameter, frozenset({RESIDUAL}))
    reasons = {
        flow.escape: bool(flow.escape),
        f"{' and '.join(sorted(flow.consumers))} read it": len(flow.uses) > 1,
        flow.called_otherwise: bool(flow.called_otherwise),
        between.escape: bool(between.escape),
        f"{' and '.join(sorted(u.attribute for u in rest - noted))} read it": rest != noted,
        "a draft model reads what is between layers": reads_between and bool(noted),
    }
    why_not = next((reason for reason, holds in reasons.items() if holds), "")
    why_not = why_not or _in_the_way(inside, norm_name)
    return _producer(source, (before, model), owners[-1], why_not)


def _is_auxiliary(model: Any, use: Use) -> bool:
    """Whether a use is vLLM's call that records values between layers for a draft model."""
    noted = getattr(type(model), _AUXILIARY, None)
    return use.attribute == _AUXILIARY and noted is getattr(EagleModelMixin, _AUXILIARY)


def _in_the_way(flow: Flow, norm_name: str) -> str:
    """Reason why a norm with a residual is not the sole consumer of a value; empty if it is."""
    expected = {Use(norm_name, 0)}
    others = sorted({use.attribute for use in flow.uses - expected})
    reasons = {
        flow.escape: bool(flow.escape),
        f"{' and '.join(others)} read it": bool(others),
        flow.called_otherwise: bool(flow.called_otherwise),
        "the norm is called without a residual": norm_name in flow.alone,
        "the norm is not called with it": not flow.uses >= expected,
    }
    return next((reason for reason, holds in reasons.items() if holds), "")


def _producer(source: _Source, owners: Sequence[Any], root: Any, why_not: str) -> Producer:
    path = tuple(dict.fromkeys((source.layer, source.module)))
    return Producer(source.layer, why_not or _unsupported_reason(path, owners, root))


def _unsupported_reason(path: Sequence[Any], owners: Sequence[Any], root: Any) -> str:
    """Reason why shared modules, a replaced forward or hooks rule out fusion; else empty.

    Args:
        path: the row-parallel layer, and the submodule that returns its result.
        owners: modules whose forward passes carry the result to the norm.
        root: outermost module.
    """
    for module in path:
        places = (each for holder in root.modules() for each in holder._modules.values())
        if sum(each is module for each in places) > 1:
            return f"this {type(module).__name__} has another place in the model too"
    for module in (*path, *owners):
        if "forward" in vars(module):
            return f"the forward of this {type(module).__name__} was replaced"
    for module in (*path, *owners[:1]):
        if module._forward_hooks or module._forward_pre_hooks:
            return f"there are hooks at this {type(module).__name__}"
    return ""


def _sources(owner: Any) -> Iterator[_Source]:
    """Submodules of an owner, each with the row-parallel layer whose result it returns, if any."""
    for name, module in owner._modules.items():
        if type(module) is RowParallelLinear:
            yield _Source(name, module, module, _returns(module))
        elif module is not None:
            yield _source(name, module)


def _source(name: str, module: Any) -> _Source:
    escape = ""
    for inner, layer in module._modules.items():
        if type(layer) is RowParallelLinear:
            flow = flow_of(module, inner, _returns(layer), may_return=True)
            always = not flow.called_otherwise
            if always and flow.uses == {Use(RETURNED, ALONE)}:
                return _Source(name, module, layer, "result")
            if always and flow.uses == {Use(RETURNED, 0)}:
                return _Source(name, module, layer, "pair")
            escape = flow.escape or flow.called_otherwise
    return _Source(name, module, None, "result", escape)


def _returns(layer: Any) -> Returns:
    return "pair" if layer.return_bias else "result"
