"""Constants in the branch conditions of a built module's methods, and the branches taken.

Layers of one class may differ in flags such as ``use_rope``; a condition on a flag takes the same
branch in every run of one layer. An attribute counts as constant if nothing assigns to it but
``__init__`` and methods that only ``__init__`` calls.
"""

import ast
import dis
import inspect
import operator
import textwrap
from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from functools import cache
from types import FunctionType
from typing import Any

from torch.nn import Module

Constants = tuple[tuple[str, Hashable], ...]

_SIMPLE = (bool, int, float, str, type(None))
_CHANGING = frozenset({"training"})  # set by eval() and train()
_SETTERS = frozenset({"__setattr__", "setattr", "delattr", "__dict__", "vars"})
_COMPARISONS: dict[type[ast.cmpop], Callable[[Any, Any], bool]] = {
    ast.Eq: operator.eq, ast.NotEq: operator.ne, ast.Lt: operator.lt, ast.LtE: operator.le,
    ast.Gt: operator.gt, ast.GtE: operator.ge, ast.In: lambda a, b: a in b,
    ast.NotIn: lambda a, b: a not in b,
}  # fmt: skip


class _Held:
    """Stand-in for the value of a submodule: not None, otherwise unknown."""


HELD = _Held()


class _Unknown(Exception):
    """Signal that the value of an expression depends on more than constants."""


def functions_of(owner: type[Module]) -> Iterator[tuple[str, FunctionType]]:
    """Methods of a class and its bases up to torch's Module, overridden methods included.

    Methods of ``Module`` itself are left out.
    """
    bases = owner.__mro__[: owner.__mro__.index(Module)]
    members = (member for base in bases for member in vars(base).items())
    return ((name, each) for name, each in members if isinstance(each, FunctionType))


def builders_of(owner: type[Module]) -> set[str]:
    """Names of ``__init__`` and of the methods that only ``__init__`` refers to."""
    names: dict[str, set[str]] = {"__init__": set()}
    for name, function in functions_of(owner):
        names.setdefault(name, set()).update(function.__code__.co_names)
    others = {each for name, used in names.items() if name != "__init__" for each in used}
    return {"__init__", *(names["__init__"] & names.keys() - others)}


def constants_of(module: Module) -> Constants:
    """Attributes in a module's branch conditions that no method changes, with their values.

    The value of a submodule is ``HELD`` (present) or None; other values are numbers, strings, bools
    or None.
    """
    kind: Any = type(module)
    found: dict[str, Hashable] = {}
    for name in _tested(kind) - _changed(kind) - _CHANGING:
        if name in module._modules:
            found[name] = None if module._modules[name] is None else HELD
        elif type(value := _plain(module, name)) in _SIMPLE:
            found[name] = value
    return tuple(sorted(found.items()))


def decided(test: ast.expr, self_name: str, constants: Mapping[str, Hashable]) -> bool | None:
    """Truth of a condition that depends on constants alone; None: may differ between runs.

    Args:
        test: the condition, an expression of a method.
        self_name: name of the method's ``self`` parameter.
        constants: see ``constants_of``.
    """
    try:
        return _truth(_value(test, self_name, constants))
    except (_Unknown, TypeError):
        return None


@cache
def _tested(owner: Any) -> frozenset[str]:
    """Names of attributes, of ``self`` or another variable, in branch conditions of any method."""
    found: set[str] = set()
    for _, function in functions_of(owner):
        try:
            tree = ast.parse(textwrap.dedent(inspect.getsource(function)))
        except (OSError, TypeError, ValueError, SyntaxError):
            continue
        tests = [node.test for node in ast.walk(tree) if isinstance(node, ast.If | ast.IfExp)]
        nodes = (node for test in tests for node in ast.walk(test))
        found |= {
            node.attr
            for node in nodes
            if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name)
        }
    return frozenset(found)


@cache
def _changed(owner: Any) -> frozenset[str]:
    """Attributes that methods may assign after construction; if unknown, all of ``_tested``."""
    builders, found = builders_of(owner), set[str]()
    for name, function in functions_of(owner):
        if name in builders:
            continue
        if _SETTERS & {*function.__code__.co_names}:
            return _tested(owner)
        steps = dis.get_instructions(function)
        found |= {s.argval for s in steps if s.opname in ("STORE_ATTR", "DELETE_ATTR")}
    return frozenset(found)


def _plain(module: Module, name: str) -> Any:
    """Attribute of a module or else of its class, read without running descriptors.

    ``HELD`` if neither has the attribute, e.g. a parameter.
    """
    if name in vars(module):
        return vars(module)[name]
    return inspect.getattr_static(type(module), name, HELD)


def _value(node: ast.expr, self_name: str, constants: Mapping[str, Hashable]) -> Any:
    match node:
        case ast.Constant(value=value):
            return value
        case ast.Attribute(value=ast.Name(id=name), attr=attr) if (
            name == self_name and attr in constants
        ):
            return constants[attr]
        case ast.UnaryOp(op=ast.Not(), operand=operand):
            return not _truth(_value(operand, self_name, constants))
        case ast.BoolOp(op=op, values=values):
            stops = isinstance(op, ast.Or)
            for each in values:
                value = _value(each, self_name, constants)
                if _truth(value) is stops:
                    break
            return value
        case ast.Tuple(elts=elements) | ast.List(elts=elements) | ast.Set(elts=elements):
            return tuple(_value(each, self_name, constants) for each in elements)
        case ast.Compare(left=left, ops=ops, comparators=comparators):
            values = [_value(each, self_name, constants) for each in (left, *comparators)]
            return all(map(_compared, ops, values, values[1:]))
    raise _Unknown


def _compared(op: ast.cmpop, left: Any, right: Any) -> bool:
    if isinstance(op, ast.Is | ast.IsNot):
        if left is not None and right is not None:
            raise _Unknown  # identity of equal values is unknown
        return (left is right) is isinstance(op, ast.Is)
    if any(each is HELD for each in _flat((left, right))):
        raise _Unknown
    return bool(_COMPARISONS[type(op)](left, right))


def _flat(values: Sequence[Any]) -> Iterator[Any]:
    for each in values:
        yield from _flat(each) if isinstance(each, tuple) else (each,)


def _truth(value: Any) -> bool:
    if value is HELD:
        raise _Unknown  # a list of modules may be empty, so its truth is unknown
    return bool(value)
