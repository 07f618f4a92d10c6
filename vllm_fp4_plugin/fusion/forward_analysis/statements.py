"""Statements of a method, and the local names that hold the value after each statement."""

import ast
from types import FunctionType

from vllm_fp4_plugin.fusion.forward_analysis.branches import Branches
from vllm_fp4_plugin.fusion.forward_analysis.expressions import ExpressionReader
from vllm_fp4_plugin.fusion.forward_analysis.flow import (
    ALONE,
    RETURNED,
    EscapeError,
    State,
    Tracked,
    Use,
)
from vllm_fp4_plugin.fusion.forward_analysis.layer_loop import layer_variable
from vllm_fp4_plugin.fusion.forward_analysis.method_source import MethodSource
from vllm_fp4_plugin.fusion.forward_analysis.tracked_class import TrackedClass


class MethodReader:
    """Reader of one method, statement by statement.

    Args:
        owner: class that owns the method; records the uses.
        function: the method.
        past_escapes: whether to skip a statement in which the value escapes, and read on.

    Attributes:
        stored: attributes that the method assigns to.
    """

    def __init__(
        self, owner: TrackedClass, function: FunctionType, *, past_escapes: bool = False
    ) -> None:
        self.stored: set[str] = set()
        self._owner = owner
        self._past_escapes = past_escapes
        self._source = MethodSource(owner.name, function)
        self._self = self._source.self_name
        not_none = owner.query.not_none if self._source.is_forward else ()
        self._branches = Branches(self._self, owner.constants, not_none)
        self._expressions = ExpressionReader(owner, self._source, self._branches)
        self._loops = 0

    def read(self) -> None:
        """Read the method.

        Raises:
            EscapeError: the value, or the submodule itself, escapes.
        """
        definition = self._source.definition
        self.stored = self._source.stored()
        self._block(definition.body, self._entry(definition.args))

    def _entry(self, parameters: ast.arguments) -> State:
        """State on entry of the method: empty, or the parameter of ``forward`` that is followed."""
        parameter = self._owner.query.parameter
        if parameter is None or not self._source.is_forward:
            return {}
        names = [each.arg for each in (*parameters.posonlyargs, *parameters.args)][1:]
        if isinstance(parameter, str):
            names += [each.arg for each in parameters.kwonlyargs]
            match = parameter if parameter in names else None
        else:
            match = names[parameter] if parameter < len(names) else None
        if match is None:
            raise self._source.escape(f"takes no parameter {parameter}")
        return {match: Tracked.RESULT}

    def _block(self, statements: list[ast.stmt], state: State) -> bool:
        """Read statements; return whether no path continues after the last statement."""
        for statement in statements:
            try:
                if self._statement(statement, state):
                    return True
            except EscapeError:
                if not self._past_escapes:
                    raise
        return False

    def _statement(self, statement: ast.stmt, state: State) -> bool:
        """Read a statement; return whether no path leads to the next statement."""
        self._source.statement = statement
        expressions = self._expressions
        match statement:
            case ast.Assign(targets=targets, value=value):
                part = expressions.value(value, state)
                for target in targets:
                    self._bind(target, part, state)
            case ast.AnnAssign(target=target, value=ast.expr() as value):
                self._bind(target, expressions.value(value, state), state)
            case ast.Expr(value=value):
                expressions.value(value, state)
            case ast.If():
                return self._branch(statement, state)
            case ast.Import() | ast.ImportFrom():
                for alias in statement.names:
                    state.pop(alias.asname or alias.name.partition(".")[0], None)
            case ast.Return(value=ast.expr() as value) if (
                self._owner.query.may_return and self._source.is_forward
            ):
                self._return(value, state)
                return True
            case ast.Return() | ast.Raise() | ast.Break() | ast.Continue():
                expressions.clean(statement, state)
                return True
            case ast.For(target=target, iter=iterated, body=body, orelse=[]) if (
                layer := self._layer_of(target, iterated)
            ):
                self._loop(layer, body, state)
            case _:  # other statements, such as loops, in which any use of the value is an escape
                expressions.clean(statement, state)
                self._branches.forget(statement)
        return False

    def _branch(self, statement: ast.If, state: State) -> bool:
        taken = self._branches.outcome(statement.test)
        if taken is not None:
            return self._block(statement.body if taken else statement.orelse, state)
        self._expressions.clean(statement.test, state)
        other = dict(state)
        ends, other_ends = self._block(statement.body, state), self._block(statement.orelse, other)
        if ends:
            state.clear()
            state.update(other)
        elif not other_ends:
            _join(state, other)
        return ends and other_ends

    def _return(self, value: ast.expr, state: State) -> None:
        elements = value.elts if isinstance(value, ast.Tuple) else [value]
        parts = [self._expressions.value(each, state) for each in elements]
        if any(parts[1:]) or parts[0] not in (None, Tracked.RESULT):
            raise self._expressions.misused()
        if parts[0] is not None:
            pair = len(elements) == 2
            if len(elements) > 2 or (isinstance(value, ast.Tuple) and not pair):
                raise self._expressions.misused()
            self._owner.uses.add(Use(RETURNED, 0 if pair else ALONE))
        else:
            self._owner.without.add(RETURNED)

    def _layer_of(self, target: ast.expr, iterated: ast.expr) -> str:
        """Name of a loop's variable if the loop goes over the rank's decoder layers; else ""."""
        if not self._owner.query.looped:
            return ""
        return layer_variable(self._source, self._owner.producer, target, iterated)

    def _loop(self, layer: str, body: list[ast.stmt], state: State) -> None:
        """Read a loop over layers twice: for a layer's result, and for its use by the next layer.

        The last layer's result, used after the loop, is not followed.

        Args:
            layer: loop variable that holds the layer.
            body: body of the loop.
            state: state before the loop.
        """
        self._loops += 1
        leaving = (ast.Break, ast.Continue, ast.Return)
        if self._loops > 1 or any(isinstance(n, leaving) for each in body for n in ast.walk(each)):
            producer = self._owner.producer
            raise self._source.escape(f"goes through {producer} in a way that is not understood")
        turn = {**state, layer: Tracked.LAYER}
        self._block(body, turn)
        self._expressions.is_later = True
        self._block(body, turn)
        if turn.pop(layer, None) is not Tracked.LAYER or turn:
            raise self._expressions.misused()

    def _bind(self, target: ast.expr, part: Tracked | None, state: State) -> None:
        match target, part:
            case ast.Name(id=name), None:
                state.pop(name, None)
                self._branches.assign(name)
            case ast.Name(id=name), Tracked():
                state[name] = part
                self._branches.assign(name)
            case ast.Tuple(elts=[ast.Name(id=first), ast.Name(id=second)]), Tracked.PAIR:
                result, other = (second, first) if self._owner.index else (first, second)
                state.pop(other, None)
                self._branches.assign(result, other)
                state[result] = Tracked.RESULT
            case ast.Tuple(elts=elements) | ast.List(elts=elements), None:
                for element in elements:
                    self._bind(element, None, state)
            case ast.Attribute(value=ast.Name(id=self._self)), None:
                pass  # among ``stored``
            case ((ast.Attribute() | ast.Subscript() | ast.Starred()), None):
                self._expressions.children(target, state)
            case _:
                raise self._expressions.misused()


def _join(state: State, other: State) -> None:
    """Merge the names of two branches into ``state``; names that differ become SOMETIMES."""
    for name in state.keys() | other.keys():
        if state.get(name) is not other.get(name):
            state[name] = Tracked.SOMETIMES
