"""Reader of expressions: finds the followed value in their results and in arguments of calls.

See the package for *value*.
"""

import ast
from collections.abc import Callable
from typing import Any

from vllm.model_executor.layers.fusion.fused_act_quant import maybe_fused_act_quant

from vllm_fp4_plugin.fusion.forward_analysis.branches import Branches
from vllm_fp4_plugin.fusion.forward_analysis.flow import (
    EscapeError,
    Parameter,
    State,
    Tracked,
    Use,
)
from vllm_fp4_plugin.fusion.forward_analysis.method_source import MethodSource
from vllm_fp4_plugin.fusion.forward_analysis.tracked_class import TrackedClass

# Functions that call their first argument, a module, with their second, and otherwise only check
# for a kernel registered under the module's class; modules among their other arguments are not
# called.
HANDOVERS: frozenset[Callable[..., Any]] = frozenset({maybe_fused_act_quant})


class ExpressionReader:
    """Reader of a method's expressions; records uses of the value in ``owner``.

    Args:
        owner: class of the method.
        source: source of the method.
        branches: evaluator of the method's branch conditions.

    Attributes:
        is_later: whether a loop over layers is read for the second time, to follow the result of
            the previous iteration's layer.
    """

    def __init__(self, owner: TrackedClass, source: MethodSource, branches: Branches) -> None:
        self.is_later = False
        self._owner = owner
        self._source = source
        self._branches = branches
        self._self = source.self_name

    def value(self, node: ast.AST, state: State) -> Tracked | None:
        """Read an expression; return the relation of its result to the followed value, or None.

        Raises:
            EscapeError: the value, or the submodule itself, escapes.
        """
        owner, source = self._owner, self._source
        match node:
            case ast.Call(func=ast.Attribute(value=ast.Name(id=self._self), attr=attr)):
                return self._call(node, attr, state)
            case ast.Call(func=ast.Name(id=name)) if state.get(name) is Tracked.LAYER:
                self._consume(owner.producer, self._arguments(node), state)
                return None if self.is_later else owner.returned(0)
            case ast.Call(
                func=ast.Name(id=name),
                args=[ast.Attribute(value=ast.Name(id=self._self), attr=attr), argument, *rest],
            ) if source.global_function(name) in HANDOVERS:
                for each in (*rest, *node.keywords):
                    if not source.is_own(each, owner.producer):
                        self.clean(each, state)
                if attr == owner.producer:
                    self.clean(argument, state)
                    return owner.returned(1)
                self._consume(attr, [(0, argument)], state)
                return None
            case ast.Subscript(value=value, slice=ast.Constant(value=0 | 1 as index)):
                part = self.value(value, state)
                if part is Tracked.RESULT:
                    raise self.misused()
                return Tracked.RESULT if part is Tracked.PAIR and index == owner.index else None
            case ast.Call(func=ast.Attribute(value=viewed, attr="view")) if owner.query.as_tensor:
                part = self.value(viewed, state)
                for each in (*node.args, *node.keywords):
                    self.clean(each, state)
                if part is Tracked.PAIR:
                    raise self.misused()
                return part
            case ast.Attribute(value=ast.Name(id=self._self), attr=attr):
                if attr == owner.producer:
                    raise source.escape(f"uses {attr} otherwise than by calling it")
                owner.reach(attr)
                return None
            case ast.Attribute(value=ast.Name(id=name), attr="shape" | "dtype"):
                if not owner.query.as_input or state.get(name) is Tracked.PAIR:
                    self.clean(node.value, state)
                return None
            case ast.Name(id=self._self):
                raise source.escape("hands itself on")
            case ast.Name(id=name):
                if state.get(name) is Tracked.SOMETIMES:
                    raise source.escape(f"has {owner.followed} in {name} on some paths alone")
                return state.get(name)
            case ast.IfExp(test=test) if (taken := self._branches.outcome(test)) is not None:
                return self.value(node.body if taken else node.orelse, state)
        self.children(node, state)
        return None

    def children(self, node: ast.AST, state: State) -> None:
        """Read a node's children, which must not hold any part of the value."""
        for child in ast.iter_child_nodes(node):
            self.clean(child, state)

    def clean(self, node: ast.AST, state: State) -> None:
        """Read an expression that must not hold any part of the value."""
        if self.value(node, state) is not None:
            raise self.misused()

    def misused(self) -> EscapeError:
        """Error for the current statement: the value is used elsewhere than in a layer's call."""
        return self._source.escape(f"uses {self._owner.followed} elsewhere than in a layer")

    def _call(self, node: ast.Call, attr: str, state: State) -> Tracked | None:
        """Read a call of an attribute of ``self``; return the result's relation to the value."""
        arguments = self._arguments(node)
        if attr == self._owner.producer:
            for _, each in arguments:
                self.clean(each, state)
            part = self._owner.returned(len(arguments))
            if part is None:
                raise self._source.escape(f"calls {attr} with {len(arguments)} arguments", node)
            self._owner.arguments.add(tuple(parameter for parameter, _ in arguments))
            return part
        self._consume(attr, arguments, state)
        return None

    @staticmethod
    def _arguments(node: ast.Call) -> list[tuple[Parameter | None, ast.expr]]:
        """Arguments of a call, each with its position or name; None for ``*`` and ``**``."""
        positional: list[tuple[Parameter | None, ast.expr]] = [
            (None if isinstance(each, ast.Starred) else place, each)
            for place, each in enumerate(node.args)
        ]
        return positional + [(each.arg, each.value) for each in node.keywords]

    def _consume(
        self, attr: str, arguments: list[tuple[Parameter | None, ast.expr]], state: State
    ) -> None:
        """Read a call of an attribute of ``self``; record whether the call takes the value.

        Raises:
            EscapeError: the call takes the value in a way that the query does not allow.
        """
        parts = [(parameter, self.value(each, state)) for parameter, each in arguments]
        if attr != self._owner.producer:
            self._owner.reach(attr)
        holding = [each for each in parts if each[1] is not None]
        if not holding:
            self._owner.without.add(attr)
            return
        [(parameter, part), *more] = holding
        alone = len(arguments) == 1 and parameter == 0
        if (
            part is Tracked.PAIR
            or more
            or parameter is None
            or not (alone or self._owner.query.as_input)
        ):
            raise self.misused()
        self._owner.uses.add(Use(attr, parameter))
        if len(arguments) == 1:
            self._owner.alone.add(attr)
