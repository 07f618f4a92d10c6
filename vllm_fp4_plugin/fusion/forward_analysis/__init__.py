"""Escape analysis of forward passes: uses of a submodule's result or of a module's input.

The source code is analysed, so that the answer holds for every path through the code. The result or
input, called the value, is followed from statement to statement. If a name holds the value after
only one of two branches, any later use of the name counts as an escape, as does any construct that
is not understood. A branch on a constant of the built module is resolved; see
``module_constants``.
"""

from contextlib import suppress
from functools import cache
from typing import Any

from torch.nn import Module

from vllm_fp4_plugin.fusion.forward_analysis.flow import (
    ALONE,
    RETURNED,
    EscapeError,
    Flow,
    Parameter,
    Query,
    Returns,
    Use,
)
from vllm_fp4_plugin.fusion.forward_analysis.statements import MethodReader
from vllm_fp4_plugin.fusion.forward_analysis.tracked_class import TrackedClass
from vllm_fp4_plugin.fusion.module_constants import Constants, constants_of

__all__ = [
    "ALONE",
    "RETURNED",
    "Flow",
    "Parameter",
    "Returns",
    "Use",
    "flow_of",
    "flow_of_layers",
    "flow_of_parameter",
]


def flow_of(
    owner: Any,
    producer: str,
    returns: Returns,
    as_input: bool = False,
    as_tensor: bool = False,
    may_return: bool = False,
) -> Flow:
    """Follow the result of ``self.<producer>(…)`` through the methods of a class.

    Args:
        owner: module that owns the submodule, or its class; branches on the module's constants are
            resolved only for a module.
        producer: attribute of the submodule in ``owner``.
        returns: return convention of the submodule.
        as_input: whether calls may take further arguments with the value, and the value's shape and
            dtype may be read. Otherwise the value must be the only argument.
        as_tensor: whether the result of ``value.view(…)`` is followed as the value.
        may_return: whether ``forward`` may return the value, alone or as the first of a pair; the
            return is then recorded as ``Use(RETURNED, ALONE)`` or ``Use(RETURNED, 0)``. If False,
            a return of the value is an escape.
    """
    return _flow(owner, Query(producer, returns, as_input, as_tensor, may_return))


def flow_of_parameter(
    owner: Any, parameter: Parameter, not_none: frozenset[str] = frozenset()
) -> Flow:
    """Follow a parameter of a class's ``forward``, as ``flow_of`` does with ``as_input``.

    Args:
        owner: module or class, see ``flow_of``.
        parameter: parameter of ``forward``, by position after ``self`` or by name.
        not_none: names of parameters of ``forward`` that are never None; branches taken only for
            None are skipped.
    """
    return _flow(owner, Query("", "result", True, parameter=parameter, not_none=not_none))


def flow_of_layers(owner: Any, layers: str, returns: Returns) -> Flow:
    """Follow the results of all but the last layer of a list through the loop over the list.

    Args:
        owner: module, or its class, whose ``forward`` loops once over this rank's layers of the
            list, in order, and calls each layer.
        layers: attribute of the list in ``owner``; a call of a layer with the previous layer's
            result is a ``Use`` of this attribute.
        returns: return convention of a layer.
    """
    return _flow(owner, Query(layers, returns, True, looped=True))


def _flow(owner: Any, query: Query) -> Flow:
    kind: Any = type(owner) if isinstance(owner, Module) else owner
    constants = constants_of(owner) if isinstance(owner, Module) else ()
    return _flow_of_class(kind, constants, query)


@cache
def _flow_of_class(kind: Any, constants: Constants, query: Query) -> Flow:
    owner = TrackedClass(kind, constants, query)
    try:
        _read(owner)
    except EscapeError as escape:
        again = TrackedClass(kind, constants, query)
        with suppress(EscapeError):
            _read(again, past_escapes=True)
        return Flow(frozenset(), str(escape), despite=frozenset(again.uses))
    return Flow(
        frozenset(owner.uses),
        "",
        frozenset(owner.without),
        frozenset(owner.alone),
        frozenset(owner.arguments),
    )


def _read(owner: TrackedClass, *, past_escapes: bool = False) -> None:
    """Read ``forward``, methods reachable from it, and any method that mentions the submodule.

    Args:
        owner: the class; records the uses.
        past_escapes: whether to skip a statement in which the value escapes, and read on.

    Raises:
        EscapeError: the value, or the submodule itself, escapes.
    """
    owner.start()
    stored: set[str] = set()
    read = 0
    while read < len(owner.methods):  # reading a method may append methods
        reader = MethodReader(owner, list(owner.methods)[read], past_escapes=past_escapes)
        reader.read()
        stored |= reader.stored
        read += 1
    owner.finish(stored)
