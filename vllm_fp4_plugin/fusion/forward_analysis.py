"""Flow of a value through a forward pass: a submodule's result, or what the module is called with.

Read from source, so that it holds for every path that a run may take: a name that holds the value
after one branch alone is not followed further, and using it is a leak. A branch whose test is a
constant of the built module counts as the run will take it, see ``module_constants``. The result is
followed from statement to statement; whatever is not understood counts as a leak.
"""

import ast
import builtins
import dis
import inspect
import itertools
import textwrap
from collections.abc import Callable
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

# Functions that call their first argument, a module, with their second, and look at neither but
# for a kernel registered under the module's own class; modules among the others they do not call.
HANDOVERS: frozenset[Callable[..., Any]] = frozenset({maybe_fused_act_quant})

_SNIPPET = 60  # characters of source that a reason quotes

# Run later or elsewhere than where they stand, so that order says nothing of what they see.
_OUT_OF_ORDER = (
    ast.AsyncFunctionDef, ast.Await, ast.ClassDef, ast.FunctionDef, ast.GeneratorExp, ast.Global,
    ast.Lambda, ast.NamedExpr, ast.Nonlocal, ast.Yield, ast.YieldFrom,
)  # fmt: skip
_REFLECTION = frozenset({"eval", "exec", "globals", "locals", "super", "vars"})
# The compiler calls a function of an imported module in another way than a method.
_DEPENDENT = frozenset({"NOP", "PRECALL", "PUSH_NULL"})
_SAME = {"LOAD_METHOD": "LOAD_ATTR"}
_OF_MODULES = frozenset({*vars(Module()), "__class__", "__dict__"} - {"training"})


# What a submodule returns: its result, a pair of it and something else, a pair whose second it is,
# or as norms do, which return a pair, of it and the new residual, where they are called with a
# residual too.
Returns = Literal["result", "pair", "second", "norm"]
Parameter = int | str  # of a call: its place among the positional ones, or its name

# A ``Use`` that is no call: ``forward`` returns the value, as the first of a pair (0) or alone.
RETURNED = "return"
ALONE = "alone"

_ENDS = ("start_layer", "end_layer")  # attributes of vLLM's models: the layers that this rank has


class Use(NamedTuple):
    """Call of one of the owner's attributes with the value.

    Attributes:
        attribute: the attribute.
        parameter: what the value is passed as.
    """

    attribute: str
    parameter: Parameter


@dataclass(frozen=True)
class Flow:
    """Way that a forward pass takes a value.

    Attributes:
        uses: calls with it.
        leak: first use beside those, in words; empty if there is none.
        without: attributes of the owner that are called without it, there or elsewhere.
        alone: attributes of the owner that are called with it and nothing else.
        arguments: what calls of the producer are given, each call's parameters in order.
    """

    uses: frozenset[Use]
    leak: str
    without: frozenset[str] = field(default=frozenset(), compare=False)
    alone: frozenset[str] = field(default=frozenset(), compare=False)
    arguments: frozenset[tuple[Parameter | None, ...]] = field(default=frozenset(), compare=False)

    @property
    def consumers(self) -> frozenset[str]:
        """Attributes of the owner that are called with it."""
        return frozenset(use.attribute for use in self.uses)

    @property
    def called_otherwise(self) -> str:
        """Reason that calls of a consumer without the value give; empty if there is none."""
        names = self.consumers & self.without
        if RETURNED in names:
            return "something else is returned too"
        return f"{' and '.join(sorted(names))} is called with something else too" if names else ""


@dataclass(frozen=True)
class _Asked:
    """Question that a class is read for; see ``flow_of`` and its siblings.

    Attributes:
        producer: the submodule whose result is followed; empty: a parameter is.
        returns: what it returns.
        as_input: see ``flow_of``.
        as_tensor: see ``flow_of``.
        may_return: see ``flow_of``.
        parameter: of ``forward``, that is followed.
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
        owner: module that owns the submodule; or its class, of which no constant is known.
        producer: its attribute there.
        returns: what it returns.
        as_input: it is a layer's input: others may be called with it among other arguments, and
            its shape and dtype may be asked for. If not, with it alone.
        as_tensor: it stays a tensor, of which a view is the same value.
        may_return: ``forward`` may return it, which is a ``Use`` of ``RETURNED``.
    """
    return _flow(owner, _Asked(producer, returns, as_input, as_tensor, may_return))


def flow_of_parameter(
    owner: Any, parameter: Parameter, given: frozenset[str] = frozenset()
) -> Flow:
    """Follow what ``forward`` of a class is called with, as an input; see ``flow_of``.

    Args:
        owner: the module, or its class, as for ``flow_of``.
        parameter: of its ``forward``, as callers pass it.
        given: parameters that are not None in the calls in question: branches for others do not
            count.
    """
    return _flow(owner, _Asked("", "result", True, parameter=parameter, given=given))


def flow_of_layers(owner: Any, layers: str, returns: Returns) -> Flow:
    """Follow what each layer of a list, but for the last, returns to the loop that calls them all.

    Args:
        owner: module, or its class, whose ``forward`` loops over the list, once, from the first to
            the last of this rank's, and calls each.
        layers: the list's attribute there; calls of its layers are a ``Use`` of it.
        returns: what a layer returns.
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
        return Flow(frozenset(), str(leak))
    return Flow(
        frozenset(reader.uses),
        "",
        frozenset(reader.without),
        frozenset(reader.alone),
        frozenset(reader.arguments),
    )


class _LeakError(Exception):
    """Use of the result, or of what could reach it, that is not known to be harmless."""


class _Held(Enum):
    """Share that an expression holds of the value; None stands for none."""

    RESULT = "result"
    PAIR = "pair"  # of it and something else
    LAYER = "layer"  # the module that produces it, of a list
    SOMETIMES = "sometimes"  # what it holds depends on the path that was taken


_State = dict[str, _Held]  # local names that hold something


class _ClassReader:
    """Reader of ``forward`` and of every method that it reaches or that names the submodule.

    Args:
        owner: the class.
        constants: attributes that tests of an instance ask for, and their values.
        asked: what it is read for.

    Attributes:
        uses: calls with the value so far.
        without: attributes that are called without it.
        alone: attributes that are called with it alone.
        arguments: parameters of the producer's calls.
    """

    def __init__(self, owner: type[Module], constants: Constants, asked: _Asked) -> None:
        self.owner = owner
        self.constants = dict(constants)
        self.asked = asked
        self.producer = asked.producer
        self.uses: set[Use] = set()
        self.without: set[str] = set()
        self.alone: set[str] = set()
        self.arguments: set[tuple[Parameter | None, ...]] = set()
        self._stored: set[str] = set()
        self._methods: dict[FunctionType, None] = {}  # in the order they are reached

    @property
    def followed(self) -> str:
        """Name of what is followed, in words."""
        return f"{self.producer}'s result" if self.producer else f"its input {self.asked.parameter}"

    def returned(self, arguments: int) -> _Held | None:
        """Share that a call of the producer with so many arguments holds; None: it is not known."""
        if self.asked.returns == "norm":
            return {1: _Held.RESULT, 2: _Held.PAIR}.get(arguments)
        return _Held.RESULT if self.asked.returns == "result" else _Held.PAIR

    @property
    def place(self) -> int:
        """Place of the value in a pair."""
        return 1 if self.asked.returns == "second" else 0

    def read(self) -> None:
        """Read all that matters.

        Raises:
            _LeakError: the result, or the submodule itself, goes elsewhere.
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
        while read < len(self._methods):  # which reading adds to
            reader = _MethodReader(self, list(self._methods)[read])
            reader.read()
            self._stored |= reader.stored
            read += 1
        for name in self._stored & {self.producer, *(use.attribute for use in self.uses)}:
            raise _LeakError(f"{self.owner.__name__} replaces its {name} while it runs")
        if not self.uses:
            raise _LeakError(f"{self.owner.__name__} calls no layer with {self.followed}")

    def reach(self, name: str) -> None:
        """Note that a method asks ``self`` for an attribute other than the submodule."""
        member = inspect.getattr_static(self.owner, name, None)
        found = member.fget if isinstance(member, property) else member
        if name in _OF_MODULES or found is getattr(Module, name, self):
            raise _LeakError(f"{self.owner.__name__} uses torch's Module.{name}")
        if isinstance(found, FunctionType):
            self._methods[found] = None
        elif hasattr(member, "__get__") and not isinstance(member, staticmethod | classmethod):
            raise _LeakError(f"{self.owner.__name__}.{name} is no plain method")

    def _check_init(self, code: CodeType) -> None:
        """Refuse an ``__init__`` that does more with the submodule than to make it."""
        for step in dis.get_instructions(code):
            # As a constant it is part of a name.
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
        self._is_later = False  # a layer's result of the turn before is followed
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
        """Names that hold the value when the method is entered."""
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
            # Indented as it stands, or lines of its strings would begin elsewhere.
            tree = ast.parse("if 1:\n" + inspect.getsource(self.function))
        except (OSError, TypeError, ValueError, SyntaxError):
            raise self._leak("has no source that can be read") from None
        match ast.increment_lineno(tree, -1).body:
            case [ast.If(body=[ast.FunctionDef() as definition])] if self._is_source(definition):
                return definition
        raise self._leak("has no source that can be read")

    def _is_source(self, definition: ast.FunctionDef) -> bool:
        """Whether the code that runs is that of a definition, which the file has by now."""
        module = compile(ast.Module([definition], []), self.code.co_filename, "exec")
        return any(
            isinstance(code, CodeType) and _essence(code) == _essence(self.code)
            for code in module.co_consts
        )

    def _check(self, node: ast.AST) -> None:
        """Refuse what no order of statements describes, and note what is assigned to ``self``."""
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
        """Read statements; returns whether the last of them is never passed."""
        return any(self._statement(statement, state) for statement in statements)

    def _statement(self, statement: ast.stmt, state: _State) -> bool:
        """Read a statement; returns whether no path leads to the next one."""
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
            case _:  # loops and the like, which may hold anything but the result
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
        """Outcome of a test that every run has; None: it is not known before."""
        if self._is_settled(test):
            return isinstance(test, ast.Compare) and isinstance(test.ops[0], ast.IsNot)
        return decided(test, self._self, self.owner.constants)

    def _is_settled(self, test: ast.expr) -> bool:
        """Whether a test asks if a parameter is None that is known not to be."""
        match test:
            case ast.Compare(
                left=ast.Name(id=name), ops=[ast.Is() | ast.IsNot()],
                comparators=[ast.Constant(value=None)],
            ):  # fmt: skip
                return name in self._given
        return False

    def _forget(self, statement: ast.stmt) -> None:
        """Know nothing more of parameters that a statement may assign to."""
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
        """Name of each layer in a loop over all of this rank's; empty if it is no such loop."""
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
        """Whether an expression is an attribute of ``self``."""
        match node:
            case ast.Attribute(value=ast.Name(id=self._self), attr=attr):
                return attr == attribute
        return False

    def _loop(self, layer: str, body: list[ast.stmt], state: _State) -> None:
        """Read a loop over layers twice: what a turn leaves behind, and what the next makes of it.

        What the last one leaves is the last layer's result, which is not followed.
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
                pass  # noted by _check
            case ((ast.Attribute() | ast.Subscript() | ast.Starred()), None):
                self._children(target, state)
            case _:
                raise self._misused()

    def _join(self, state: _State, other: _State) -> None:
        """Leave in ``state`` what names may hold after either of two branches."""
        for name in state.keys() | other.keys():
            if state.get(name) is not other.get(name):
                state[name] = _Held.SOMETIMES

    # --- expressions ----------------------------------------------------------------------

    def _value(self, node: ast.AST, state: _State) -> _Held | None:
        """Evaluate an expression: what it holds of the value that is followed."""
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
        """Arguments of a call, and as what they are given; None: it is not known."""
        given: list[tuple[Parameter | None, ast.expr]] = [
            (None if isinstance(each, ast.Starred) else place, each)
            for place, each in enumerate(node.args)
        ]
        return given + [(each.arg, each.value) for each in node.keywords]

    def _consume(
        self, attr: str, arguments: list[tuple[Parameter | None, ast.expr]], state: _State
    ) -> None:
        """Evaluate a call of an attribute of ``self``, maybe with the value that is followed."""
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
        """Read what may hold nothing of the result."""
        if self._value(node, state) is not None:
            raise self._misused()

    def _misused(self) -> _LeakError:
        return self._leak(f"uses {self.owner.followed} elsewhere than in a layer")

    def _global(self, name: str) -> Any:
        """Function that a name means which the method does not assign to."""
        found = self.function.__globals__.get(name)
        return found if isinstance(found, FunctionType) and self._means(name, found) else None

    def _means(self, name: str, thing: Any) -> bool:
        """Whether a name means something of the module or Python's, and nothing local."""
        code = self.code
        local = {*code.co_varnames, *code.co_cellvars, *code.co_freevars}
        known = {**vars(builtins), **self.function.__globals__}
        return name not in local and known.get(name) is thing


def _essence(code: CodeType) -> tuple[Any, ...]:
    """Steps of a function, but for those that depend on what its module imports, and how far."""
    steps = (step for step in dis.get_instructions(code) if step.opname not in _DEPENDENT)
    return code.co_name, *(
        (_SAME.get(step.opname, step.opname), None if _is_target(step) else step.argval)
        for step in steps
    )


def _is_target(step: dis.Instruction) -> bool:
    return step.opcode in (*dis.hasjrel, *dis.hasjabs) or isinstance(step.argval, CodeType)
