"""Escape analysis of forward passes: uses of a submodule's result or of a module's input.

The source code is analysed, so that the answer holds for every path through it. The result or
input, called the value, is followed from statement to statement. A name that holds the value after
only one of two branches is not followed further: its use counts as an escape, as does any construct
that is not understood. A branch on a constant of the built module is resolved, see
``module_constants``.
"""

import ast
import builtins
import dis
import inspect
import itertools
import textwrap
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field
from enum import Enum
from functools import cache
from pathlib import Path
from types import CodeType, FunctionType
from typing import Any, Literal, NamedTuple

from torch.nn import Module
from vllm.model_executor.layers.fusion.fused_act_quant import maybe_fused_act_quant

from vllm_fp4_plugin.fusion.module_constants import (
    Constants,
    builders_of,
    constants_of,
    decided,
    functions_of,
)

# Functions that call their first argument, a module, with their second, and otherwise only check
# for a kernel registered under the module's class; modules among their other arguments are not
# called.
HANDOVERS: frozenset[Callable[..., Any]] = frozenset({maybe_fused_act_quant})

_SNIPPET = 60  # longest source quote in a reason

# Constructs that run later or elsewhere, so that statement order does not describe their effect.
_OUT_OF_ORDER = (
    ast.AsyncFunctionDef, ast.Await, ast.ClassDef, ast.FunctionDef, ast.GeneratorExp, ast.Global,
    ast.Lambda, ast.NamedExpr, ast.Nonlocal, ast.Yield, ast.YieldFrom,
)  # fmt: skip
_REFLECTION = frozenset({"eval", "exec", "globals", "locals", "super", "vars"})
# The compiler emits other instructions for a call of an imported module's function than for a
# method.
_DEPENDENT = frozenset({"NOP", "PRECALL", "PUSH_NULL"})
_SAME = {"LOAD_METHOD": "LOAD_ATTR"}
_OF_MODULES = frozenset({*vars(Module()), "__class__", "__dict__"} - {"training"})


# Return convention of a submodule: its result; a pair whose first or second element is the result;
# or, as for norms, the result without a residual, and with one a pair of result and new residual.
Returns = Literal["result", "pair", "second", "norm"]
Parameter = int | str  # argument of a call: its position, or its name

# A ``Use`` without a call: ``forward`` returns the value, as the first of a pair (0) or alone.
RETURNED = "return"
ALONE = "alone"

_ENDS = ("start_layer", "end_layer")  # attributes of vLLM's models: range of layers on this rank


class Use(NamedTuple):
    """Call of one of the owner's attributes with the value as an argument.

    Attributes:
        attribute: name of the attribute.
        parameter: position or name of the argument that is the value.
    """

    attribute: str
    parameter: Parameter


@dataclass(frozen=True)
class Flow:
    """Uses of a value in a forward pass.

    Attributes:
        uses: calls that receive the value.
        leak: description of the first escape; empty if the value does not escape.
        without: attributes of the owner that any method calls without the value.
        alone: attributes of the owner that are called with the value as the only argument.
        arguments: for each call of the producer, positions or names of its arguments in order.
        despite: calls with a value that escapes, as far as they can be followed; for reports.
    """

    uses: frozenset[Use]
    leak: str
    without: frozenset[str] = field(default=frozenset(), compare=False)
    alone: frozenset[str] = field(default=frozenset(), compare=False)
    arguments: frozenset[tuple[Parameter | None, ...]] = field(default=frozenset(), compare=False)
    despite: frozenset[Use] = field(default=frozenset(), compare=False)

    @property
    def consumers(self) -> frozenset[str]:
        """Attributes of the owner that are called with the value."""
        return frozenset(use.attribute for use in self.uses)

    @property
    def called_otherwise(self) -> str:
        """Reason against fusion: a consumer is also called without the value; else empty."""
        names = self.consumers & self.without
        if RETURNED in names:
            return "something else is returned too"
        return f"{' and '.join(sorted(names))} is called with something else too" if names else ""


@dataclass(frozen=True)
class _Asked:
    """Query of the analysis; see ``flow_of`` and its siblings.

    Attributes:
        producer: submodule whose result is followed; empty if a parameter is followed.
        returns: return convention of the producer.
        as_input: see ``flow_of``.
        as_tensor: see ``flow_of``.
        may_return: see ``flow_of``.
        parameter: parameter of ``forward`` that is followed.
        given: see ``flow_of_parameter``.
        looped: the producer is a list of layers, see ``flow_of_layers``.
    """

    producer: str
    returns: Returns
    as_input: bool
    as_tensor: bool = False
    may_return: bool = False
    parameter: Parameter | None = None
    given: frozenset[str] = frozenset()
    looped: bool = False


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
        owner: module that owns the submodule; or the module's class, which has no constants.
        producer: attribute of the submodule in ``owner``.
        returns: return convention of the producer.
        as_input: the value is a layer's input: a call may have further arguments, and the value's
            shape and dtype may be read. Otherwise the value must be the only argument.
        as_tensor: the value stays a tensor, and a view counts as the same value.
        may_return: ``forward`` may return the value, which is a ``Use`` of ``RETURNED``.
    """
    return _flow(owner, _Asked(producer, returns, as_input, as_tensor, may_return))


def flow_of_parameter(
    owner: Any, parameter: Parameter, given: frozenset[str] = frozenset()
) -> Flow:
    """Follow a parameter of a class's ``forward``, as an input; see ``flow_of``.

    Args:
        owner: module or class, see ``flow_of``.
        parameter: parameter of ``forward``, by position or name.
        given: parameters that are never None in these calls: branches for None are skipped.
    """
    return _flow(owner, _Asked("", "result", True, parameter=parameter, given=given))


def flow_of_layers(owner: Any, layers: str, returns: Returns) -> Flow:
    """Follow the results of all but the last layer of a list through the loop that calls them.

    Args:
        owner: module, or its class, whose ``forward`` loops once over this rank's layers of the
            list, in order, and calls each layer.
        layers: attribute of the list in ``owner``; a call of a layer is a ``Use`` of this
            attribute.
        returns: return convention of a layer.
    """
    return _flow(owner, _Asked(layers, returns, True, looped=True))


def _flow(owner: Any, asked: _Asked) -> Flow:
    kind: Any = type(owner) if isinstance(owner, Module) else owner
    constants = constants_of(owner) if isinstance(owner, Module) else ()
    return _flow_of_class(kind, constants, asked)


@cache
def _flow_of_class(owner: Any, constants: Constants, asked: _Asked) -> Flow:
    reader = _ClassReader(owner, constants, asked)
    try:
        reader.read()
    except _LeakError as leak:
        again = _ClassReader(owner, constants, asked, past_escapes=True)
        with suppress(_LeakError):
            again.read()
        return Flow(frozenset(), str(leak), despite=frozenset(again.uses))
    return Flow(
        frozenset(reader.uses),
        "",
        frozenset(reader.without),
        frozenset(reader.alone),
        frozenset(reader.arguments),
    )


class _LeakError(Exception):
    """Escape: a use of the tracked value, or of its producer, that is not known to be harmless."""


class _Held(Enum):
    """Part of the tracked value that a name or expression holds; None stands for no part."""

    RESULT = "result"
    PAIR = "pair"  # pair of the value and something else
    LAYER = "layer"  # the producer, as a loop variable over a list
    SOMETIMES = "sometimes"  # depends on the path taken


_State = dict[str, _Held]  # local names that hold a part of the value


class _ClassReader:
    """Reader of a class: follows the value that a query names.

    Reads ``forward``, the methods reachable from it, and any method that mentions the submodule.

    Args:
        owner: the class.
        constants: instance attributes used in branch conditions, with their values.
        asked: query of the analysis.
        past_escapes: whether to skip a statement in which the value escapes, and read on.

    Attributes:
        uses: calls found so far that receive the value.
        without: see ``Flow``.
        alone: see ``Flow``.
        arguments: see ``Flow``.
    """

    def __init__(
        self,
        owner: type[Module],
        constants: Constants,
        asked: _Asked,
        *,
        past_escapes: bool = False,
    ) -> None:
        self.owner = owner
        self.past_escapes = past_escapes
        self.constants = dict(constants)
        self.asked = asked
        self.producer = asked.producer
        self.uses: set[Use] = set()
        self.without: set[str] = set()
        self.alone: set[str] = set()
        self.arguments: set[tuple[Parameter | None, ...]] = set()
        self._stored: set[str] = set()
        self._methods: dict[FunctionType, None] = {}  # in order of discovery

    @property
    def followed(self) -> str:
        """Description of the value for messages."""
        return f"{self.producer}'s result" if self.producer else f"its input {self.asked.parameter}"

    def returned(self, arguments: int) -> _Held | None:
        """Part of the value in the result of a call with ``arguments`` arguments; None: unknown."""
        if self.asked.returns == "norm":
            return {1: _Held.RESULT, 2: _Held.PAIR}.get(arguments)
        return _Held.RESULT if self.asked.returns == "result" else _Held.PAIR

    @property
    def place(self) -> int:
        """Index of the tracked value in the pair that the producer returns."""
        return 1 if self.asked.returns == "second" else 0

    def read(self) -> None:
        """Read all relevant methods.

        Raises:
            _LeakError: the value, or the submodule itself, escapes.
        """
        for name in ("__getattr__", "__getattribute__"):
            if getattr(self.owner, name) is not getattr(Module, name):
                raise _LeakError(f"{self.owner.__name__} has a {name} of its own")
        self.reach("forward")
        builders = builders_of(self.owner)
        for name, function in functions_of(self.owner):
            code = function.__code__
            if name in builders and self.producer:
                self._check_init(code)
            elif self.producer and self.producer in (*code.co_names, *code.co_consts):
                self._methods[function] = None
        read = 0
        while read < len(self._methods):  # read() may append methods
            reader = _MethodReader(self, list(self._methods)[read])
            reader.read()
            self._stored |= reader.stored
            read += 1
        for name in self._stored & {self.producer, *(use.attribute for use in self.uses)}:
            raise _LeakError(f"{self.owner.__name__} replaces its {name} while it runs")
        if not self.uses:
            raise _LeakError(f"{self.owner.__name__} calls no layer with {self.followed}")

    def reach(self, name: str) -> None:
        """Record that a method reads an attribute of ``self`` other than the submodule."""
        member = inspect.getattr_static(self.owner, name, None)
        found = member.fget if isinstance(member, property) else member
        if name in _OF_MODULES or found is getattr(Module, name, self):
            raise _LeakError(f"{self.owner.__name__} uses torch's Module.{name}")
        if isinstance(found, FunctionType):
            self._methods[found] = None
        elif hasattr(member, "__get__") and not isinstance(member, staticmethod | classmethod):
            raise _LeakError(f"{self.owner.__name__}.{name} is no plain method")

    def _check_init(self, code: CodeType) -> None:
        """Refuse an ``__init__`` that does more with the submodule than assign it."""
        for step in dis.get_instructions(code):
            # As a constant, the submodule's name only builds the prefix of a layer: harmless.
            if step.argval == self.producer and step.opname not in ("STORE_ATTR", "LOAD_CONST"):
                raise _LeakError(f"{self.owner.__name__}.__init__ does more than make it")
            if isinstance(step.argval, CodeType):
                self._check_init(step.argval)


class _MethodReader:
    """Reader of one method, statement by statement.

    Attributes:
        stored: attributes that the method assigns to.
    """

    def __init__(self, owner: _ClassReader, function: FunctionType) -> None:
        self.owner = owner
        self.function = function
        self.code = function.__code__
        self.stored: set[str] = set()
        self._here: ast.AST | None = None
        self._given = set(owner.asked.given) if self._is_forward else set()
        self._is_later = False  # following the result of the previous iteration's layer
        self._loops = 0

    @property
    def _is_forward(self) -> bool:
        return self.code.co_name == "forward"

    def read(self) -> None:
        """Read the method; see ``_ClassReader.read``."""
        definition = self._definition()
        parameters = [*definition.args.posonlyargs, *definition.args.args]
        if not parameters:
            raise self._leak("takes no self")
        self._self = parameters[0].arg
        for node in (each for statement in definition.body for each in ast.walk(statement)):
            self._check(node)
        self._block(definition.body, self._entry(definition.args))

    def _entry(self, given: ast.arguments) -> _State:
        """State on entry: the parameter that is the tracked input; empty if none is tracked."""
        parameter = self.owner.asked.parameter
        if parameter is None or not self._is_forward:
            return {}
        positional = [each.arg for each in (*given.posonlyargs, *given.args)][1:]
        if isinstance(parameter, str):
            names = [*positional, *(each.arg for each in given.kwonlyargs)]
            found = parameter if parameter in names else None
        else:
            found = positional[parameter] if parameter < len(positional) else None
        if found is None:
            raise self._leak(f"takes no parameter {parameter}")
        return {found: _Held.RESULT}

    def _definition(self) -> ast.FunctionDef:
        if hasattr(self.function, "__wrapped__"):
            raise self._leak("is wrapped by a decorator")
        if self.code.co_freevars:
            raise self._leak(f"takes {self.code.co_freevars[0]} from around it")
        try:
            # Keep the indentation: dedenting would change multi-line strings.
            tree = ast.parse("if 1:\n" + inspect.getsource(self.function))
        except (OSError, TypeError, ValueError, SyntaxError):
            raise self._leak("has no source that can be read") from None
        match ast.increment_lineno(tree, -1).body:
            case [ast.If(body=[ast.FunctionDef() as definition])] if self._is_source(definition):
                return definition
        raise self._leak("has no source that can be read")

    def _is_source(self, definition: ast.FunctionDef) -> bool:
        """Whether the running code matches a definition, as the file may have changed since."""
        module = compile(ast.Module([definition], []), self.code.co_filename, "exec")
        return any(
            isinstance(code, CodeType) and _essence(code) == _essence(self.code)
            for code in module.co_consts
        )

    def _check(self, node: ast.AST) -> None:
        """Refuse constructs that run out of order; record assignments to ``self``."""
        match node:
            case ast.Name(id=name, ctx=ctx) if name in _REFLECTION or (
                name == self._self and not isinstance(ctx, ast.Load)
            ):
                raise self._leak("is not understood", node)
            case ast.Attribute(value=ast.Name(id=self._self), attr=attr, ctx=ctx):
                if not isinstance(ctx, ast.Load):
                    self.stored.add(attr)
            case _ if isinstance(node, _OUT_OF_ORDER):
                raise self._leak("is not understood", node)

    def _leak(self, what: str, node: ast.AST | None = None) -> _LeakError:
        where = f"{self.owner.owner.__name__}.{self.code.co_name}"
        node = node or self._here
        if node is None or not hasattr(node, "lineno"):
            return _LeakError(f"{where} {what}")
        line = self.code.co_firstlineno + node.lineno - 1
        text = textwrap.shorten(ast.unparse(node), _SNIPPET, placeholder=" …")
        return _LeakError(f"{where} {what} ({Path(self.code.co_filename).name}:{line}: {text})")

    # --- statements -----------------------------------------------------------------------

    def _block(self, statements: list[ast.stmt], state: _State) -> bool:
        """Read statements; return whether no path continues after the last statement."""
        for statement in statements:
            try:
                if self._statement(statement, state):
                    return True
            except _LeakError:
                if not self.owner.past_escapes:
                    raise
        return False

    def _statement(self, statement: ast.stmt, state: _State) -> bool:
        """Read a statement; return whether no path leads to the next statement."""
        self._here = statement
        match statement:
            case ast.Assign(targets=targets, value=value):
                held = self._value(value, state)
                for target in targets:
                    self._bind(target, held, state)
            case ast.AnnAssign(target=target, value=ast.expr() as value):
                self._bind(target, self._value(value, state), state)
            case ast.Expr(value=value):
                self._value(value, state)
            case ast.If():
                return self._branch(statement, state)
            case ast.Import() | ast.ImportFrom():
                for alias in statement.names:
                    state.pop(alias.asname or alias.name.partition(".")[0], None)
            case ast.Return(value=ast.expr() as value) if (
                self.owner.asked.may_return and self._is_forward
            ):
                self._return(value, state)
                return True
            case ast.Return() | ast.Raise() | ast.Break() | ast.Continue():
                self._clean(statement, state)
                return True
            case ast.For(target=target, iter=iterated, body=body, orelse=[]) if (
                layer := self._layer_of(target, iterated)
            ):
                self._loop(layer, body, state)
            case _:  # other statements, such as loops, in which any use of the value is an escape
                self._clean(statement, state)
                self._forget(statement)
        return False

    def _branch(self, statement: ast.If, state: _State) -> bool:
        taken = self._decided(statement.test)
        if taken is not None:
            return self._block(statement.body if taken else statement.orelse, state)
        self._clean(statement.test, state)
        other = dict(state)
        ends, other_ends = self._block(statement.body, state), self._block(statement.orelse, other)
        if ends:
            state.clear()
            state.update(other)
        elif not other_ends:
            self._join(state, other)
        return ends and other_ends

    def _decided(self, test: ast.expr) -> bool | None:
        """Outcome of a test if the same in every run; None if unknown."""
        if self._is_settled(test):
            return isinstance(test, ast.Compare) and isinstance(test.ops[0], ast.IsNot)
        return decided(test, self._self, self.owner.constants)

    def _is_settled(self, test: ast.expr) -> bool:
        """Whether a test compares with None a parameter that is known not to be None."""
        match test:
            case ast.Compare(
                left=ast.Name(id=name), ops=[ast.Is() | ast.IsNot()],
                comparators=[ast.Constant(value=None)],
            ):  # fmt: skip
                return name in self._given
        return False

    def _forget(self, statement: ast.stmt) -> None:
        """Forget which parameters are not None, if a statement may assign to them."""
        if isinstance(statement, ast.Try | ast.Match):
            self._given.clear()
        for node in ast.walk(statement):
            if isinstance(node, ast.Name) and not isinstance(node.ctx, ast.Load):
                self._given.discard(node.id)

    def _return(self, value: ast.expr, state: _State) -> None:
        elements = value.elts if isinstance(value, ast.Tuple) else [value]
        held = [self._value(each, state) for each in elements]
        if any(held[1:]) or held[0] not in (None, _Held.RESULT):
            raise self._misused()
        if held[0] is not None:
            pair = len(elements) == 2
            if len(elements) > 2 or (isinstance(value, ast.Tuple) and not pair):
                raise self._misused()
            self.owner.uses.add(Use(RETURNED, 0 if pair else ALONE))
        else:
            self.owner.without.add(RETURNED)

    def _layer_of(self, target: ast.expr, iterated: ast.expr) -> str:
        """Variable of a loop over all decoder layers of the rank; "" for other loops."""
        if not self.owner.asked.looped:
            return ""
        match iterated, target:
            case (
                ast.Call(func=ast.Name(id="enumerate"), args=[inner, *_]),
                ast.Tuple(elts=[ast.Name(), ast.Name(id=name)]),
            ) if self._means("enumerate", enumerate):
                return name if self._is_over_layers(inner) else ""
            case _, ast.Name(id=name):
                return name if self._is_over_layers(iterated) else ""
        return ""

    def _is_over_layers(self, node: ast.expr) -> bool:
        match node:
            case ast.Call(func=ast.Name(id=name), args=[layers, *ends], keywords=[]) if self._means(
                name, itertools.islice
            ):
                return self._is_own(layers, self.owner.producer) and self._are_ends(ends)
            case ast.Subscript(
                value=layers, slice=ast.Slice(lower=ast.expr() as first, upper=ast.expr() as last)
            ):
                whole = node.slice.step is None  # type: ignore[attr-defined]
                is_list = self._is_own(layers, self.owner.producer)
                return whole and is_list and self._are_ends([first, last])
        return self._is_own(node, self.owner.producer)

    def _are_ends(self, ends: list[ast.expr]) -> bool:
        return len(ends) == len(_ENDS) and all(map(self._is_own, ends, _ENDS))

    def _is_own(self, node: ast.AST, attribute: str) -> bool:
        """Whether an expression is this attribute of ``self``."""
        match node:
            case ast.Attribute(value=ast.Name(id=self._self), attr=attr):
                return attr == attribute
        return False

    def _loop(self, layer: str, body: list[ast.stmt], state: _State) -> None:
        """Read a loop over layers twice: for an iteration's result, and its use in the next one.

        After the loop the name holds the last layer's result, which is not followed.
        """
        self._loops += 1
        leaving = (ast.Break, ast.Continue, ast.Return)
        if self._loops > 1 or any(isinstance(n, leaving) for each in body for n in ast.walk(each)):
            raise self._leak(f"goes through {self.owner.producer} in a way that is not understood")
        turn = {**state, layer: _Held.LAYER}
        self._block(body, turn)
        self._is_later = True
        self._block(body, turn)
        if turn.pop(layer, None) is not _Held.LAYER or turn:
            raise self._misused()

    def _bind(self, target: ast.expr, held: _Held | None, state: _State) -> None:
        match target, held:
            case ast.Name(id=name), None:
                state.pop(name, None)
                self._given.discard(name)
            case ast.Name(id=name), _Held():
                state[name] = held
                self._given.discard(name)
            case ast.Tuple(elts=[ast.Name(id=first), ast.Name(id=second)]), _Held.PAIR:
                result, other = (second, first) if self.owner.place else (first, second)
                state.pop(other, None)
                self._given -= {result, other}
                state[result] = _Held.RESULT
            case ast.Tuple(elts=elements) | ast.List(elts=elements), None:
                for element in elements:
                    self._bind(element, None, state)
            case ast.Attribute(value=ast.Name(id=self._self)), None:
                pass  # recorded by _check
            case ((ast.Attribute() | ast.Subscript() | ast.Starred()), None):
                self._children(target, state)
            case _:
                raise self._misused()

    def _join(self, state: _State, other: _State) -> None:
        """Merge the names of two branches into ``state``; names that differ become SOMETIMES."""
        for name in state.keys() | other.keys():
            if state.get(name) is not other.get(name):
                state[name] = _Held.SOMETIMES

    # --- expressions ----------------------------------------------------------------------

    def _value(self, node: ast.AST, state: _State) -> _Held | None:
        """Evaluate an expression: the part of the followed value in its result."""
        match node:
            case ast.Call(func=ast.Attribute(value=ast.Name(id=self._self), attr=attr)):
                return self._call(node, attr, state)
            case ast.Call(func=ast.Name(id=name)) if state.get(name) is _Held.LAYER:
                self._consume(self.owner.producer, self._arguments(node), state)
                return None if self._is_later else self.owner.returned(0)
            case ast.Call(
                func=ast.Name(id=name),
                args=[ast.Attribute(value=ast.Name(id=self._self), attr=attr), argument, *rest],
            ) if self._global(name) in HANDOVERS:
                for each in (*rest, *node.keywords):
                    if not self._is_own(each, self.owner.producer):
                        self._clean(each, state)
                if attr == self.owner.producer:
                    self._clean(argument, state)
                    return self.owner.returned(1)
                self._consume(attr, [(0, argument)], state)
                return None
            case ast.Subscript(value=value, slice=ast.Constant(value=0 | 1 as index)):
                held = self._value(value, state)
                if held is _Held.RESULT:
                    raise self._misused()
                return _Held.RESULT if held is _Held.PAIR and index == self.owner.place else None
            case ast.Call(func=ast.Attribute(value=viewed, attr="view")) if (
                self.owner.asked.as_tensor
            ):
                held = self._value(viewed, state)
                for each in (*node.args, *node.keywords):
                    self._clean(each, state)
                if held is _Held.PAIR:
                    raise self._misused()
                return held
            case ast.Attribute(value=ast.Name(id=self._self), attr=attr):
                if attr == self.owner.producer:
                    raise self._leak(f"uses {attr} otherwise than by calling it")
                self.owner.reach(attr)
                return None
            case ast.Attribute(value=ast.Name(id=name), attr="shape" | "dtype"):
                if not self.owner.asked.as_input or state.get(name) is _Held.PAIR:
                    self._clean(node.value, state)
                return None
            case ast.Name(id=self._self):
                raise self._leak("hands itself on")
            case ast.Name(id=name):
                if state.get(name) is _Held.SOMETIMES:
                    raise self._leak(f"has {self.owner.followed} in {name} on some paths alone")
                return state.get(name)
            case ast.IfExp(test=test) if (taken := self._decided(test)) is not None:
                return self._value(node.body if taken else node.orelse, state)
        self._children(node, state)
        return None

    def _call(self, node: ast.Call, attr: str, state: _State) -> _Held | None:
        """Evaluate a call of an attribute of ``self``."""
        arguments = self._arguments(node)
        if attr == self.owner.producer:
            for _, each in arguments:
                self._clean(each, state)
            held = self.owner.returned(len(arguments))
            if held is None:
                raise self._leak(f"calls {attr} with {len(arguments)} arguments", node)
            self.owner.arguments.add(tuple(parameter for parameter, _ in arguments))
            return held
        self._consume(attr, arguments, state)
        return None

    @staticmethod
    def _arguments(node: ast.Call) -> list[tuple[Parameter | None, ast.expr]]:
        """Arguments of a call with their positions or names; None for a starred argument."""
        given: list[tuple[Parameter | None, ast.expr]] = [
            (None if isinstance(each, ast.Starred) else place, each)
            for place, each in enumerate(node.args)
        ]
        return given + [(each.arg, each.value) for each in node.keywords]

    def _consume(
        self, attr: str, arguments: list[tuple[Parameter | None, ast.expr]], state: _State
    ) -> None:
        """Evaluate a call of an attribute of ``self`` and record its use of the value, if any."""
        held = [(parameter, self._value(each, state)) for parameter, each in arguments]
        if attr != self.owner.producer:
            self.owner.reach(attr)
        holding = [each for each in held if each[1] is not None]
        if not holding:
            self.owner.without.add(attr)
            return
        [(parameter, share), *more] = holding
        alone = len(arguments) == 1 and parameter == 0
        if (
            share is _Held.PAIR
            or more
            or parameter is None
            or not (alone or self.owner.asked.as_input)
        ):
            raise self._misused()
        self.owner.uses.add(Use(attr, parameter))
        if len(arguments) == 1:
            self.owner.alone.add(attr)

    def _children(self, node: ast.AST, state: _State) -> None:
        for child in ast.iter_child_nodes(node):
            self._clean(child, state)

    def _clean(self, node: ast.AST, state: _State) -> None:
        """Read an expression that must not hold any part of the value."""
        if self._value(node, state) is not None:
            raise self._misused()

    def _misused(self) -> _LeakError:
        return self._leak(f"uses {self.owner.followed} elsewhere than in a layer")

    def _global(self, name: str) -> Any:
        """Global function that a name refers to, unless a local variable hides it."""
        found = self.function.__globals__.get(name)
        return found if isinstance(found, FunctionType) and self._means(name, found) else None

    def _means(self, name: str, thing: Any) -> bool:
        """Whether a name refers to ``thing``, a global or builtin, and not to a local variable."""
        code = self.code
        local = {*code.co_varnames, *code.co_cellvars, *code.co_freevars}
        known = {**vars(builtins), **self.function.__globals__}
        return name not in local and known.get(name) is thing


def _essence(code: CodeType) -> tuple[Any, ...]:
    """Instructions of a function, without details that depend on imports or jump distances."""
    steps = (step for step in dis.get_instructions(code) if step.opname not in _DEPENDENT)
    return code.co_name, *(
        (_SAME.get(step.opname, step.opname), None if _is_target(step) else step.argval)
        for step in steps
    )


def _is_target(step: dis.Instruction) -> bool:
    return step.opcode in (*dis.hasjrel, *dis.hasjabs) or isinstance(step.argval, CodeType)
