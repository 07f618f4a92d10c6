"""Source of one method: syntax tree, checked against the loaded code, and resolution of names."""

import ast
import builtins
import dis
import inspect
import textwrap
from pathlib import Path
from types import CodeType, FunctionType
from typing import Any

from vllm_fp4_plugin.fusion.forward_analysis.flow import EscapeError

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


class MethodSource:
    """Source of one method.

    Args:
        class_name: name of the class that owns the method, for messages.
        function: the method.

    Attributes:
        definition: syntax tree of the method.
        self_name: name of the method's ``self`` parameter.
        statement: statement being read, for messages.

    Raises:
        EscapeError: the source cannot be read, or the method is wrapped by a decorator, is a
            closure, or has no ``self``.
    """

    def __init__(self, class_name: str, function: FunctionType) -> None:
        self.statement: ast.AST | None = None
        self._class_name = class_name
        self._function = function
        self._code = function.__code__
        self.definition = self._parse()
        parameters = [*self.definition.args.posonlyargs, *self.definition.args.args]
        if not parameters:
            raise self.escape("takes no self")
        self.self_name = parameters[0].arg

    @property
    def is_forward(self) -> bool:
        """Whether the method is named ``forward``."""
        return self._code.co_name == "forward"

    def escape(self, what: str, node: ast.AST | None = None) -> EscapeError:
        """Error with the method's name, ``what`` as the predicate, and line and text of ``node``.

        ``node`` is the current statement by default.
        """
        where = f"{self._class_name}.{self._code.co_name}"
        node = node or self.statement
        if node is None or not hasattr(node, "lineno"):
            return EscapeError(f"{where} {what}")
        line = self._code.co_firstlineno + node.lineno - 1
        text = textwrap.shorten(ast.unparse(node), _SNIPPET, placeholder=" …")
        return EscapeError(f"{where} {what} ({Path(self._code.co_filename).name}:{line}: {text})")

    def stored(self) -> set[str]:
        """Attributes of ``self`` that the method assigns to.

        Raises:
            EscapeError: the method has constructs that run out of order, uses reflection, or
                rebinds the name ``self``.
        """
        stored: set[str] = set()
        for node in (each for body in self.definition.body for each in ast.walk(body)):
            match node:
                case ast.Name(id=name, ctx=ctx) if name in _REFLECTION or (
                    name == self.self_name and not isinstance(ctx, ast.Load)
                ):
                    raise self.escape("is not understood", node)
                case ast.Attribute(value=ast.Name(id=self.self_name), attr=attr, ctx=ctx):
                    if not isinstance(ctx, ast.Load):
                        stored.add(attr)
                case _ if isinstance(node, _OUT_OF_ORDER):
                    raise self.escape("is not understood", node)
        return stored

    def is_own(self, node: ast.AST, attribute: str) -> bool:
        """Whether an expression is ``self.<attribute>``."""
        match node:
            case ast.Attribute(value=ast.Name(id=self.self_name), attr=attr):
                return attr == attribute
        return False

    def global_function(self, name: str) -> FunctionType | None:
        """Global Python function that a name refers to; None if the name means anything else."""
        function = self._function.__globals__.get(name)
        is_function = isinstance(function, FunctionType) and self.means(name, function)
        return function if is_function else None

    def means(self, name: str, thing: Any) -> bool:
        """Whether a name refers to the global or builtin ``thing``, not to a local variable."""
        code = self._code
        local = {*code.co_varnames, *code.co_cellvars, *code.co_freevars}
        known = {**vars(builtins), **self._function.__globals__}
        return name not in local and known.get(name) is thing

    def _parse(self) -> ast.FunctionDef:
        if hasattr(self._function, "__wrapped__"):
            raise self.escape("is wrapped by a decorator")
        if self._code.co_freevars:
            raise self.escape(f"takes {self._code.co_freevars[0]} from around it")
        try:
            # Keep the indentation: dedenting would change multi-line strings.
            tree = ast.parse("if 1:\n" + inspect.getsource(self._function))
        except (OSError, TypeError, ValueError, SyntaxError):
            raise self.escape("has no source that can be read") from None
        match ast.increment_lineno(tree, -1).body:
            case [ast.If(body=[ast.FunctionDef() as definition])] if self._is_source(definition):
                return definition
        raise self.escape("has no source that can be read")

    def _is_source(self, definition: ast.FunctionDef) -> bool:
        """Whether the loaded method matches a definition; the file may have changed since."""
        module = compile(ast.Module([definition], []), self._code.co_filename, "exec")
        return any(
            isinstance(code, CodeType) and _essence(code) == _essence(self._code)
            for code in module.co_consts
        )


def _essence(code: CodeType) -> tuple[Any, ...]:
    """Instructions of a function, without details that depend on imports or jump distances."""
    steps = (step for step in dis.get_instructions(code) if step.opname not in _DEPENDENT)
    return code.co_name, *(
        (_SAME.get(step.opname, step.opname), None if _is_target(step) else step.argval)
        for step in steps
    )


def _is_target(step: dis.Instruction) -> bool:
    return step.opcode in (*dis.hasjrel, *dis.hasjabs) or isinstance(step.argval, CodeType)
