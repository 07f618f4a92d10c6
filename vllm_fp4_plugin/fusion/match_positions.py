"""Data flow of positions from vLLM's runner to a rotary embedding, read from forward passes.

Fused attention takes the positions from the runner's metadata, and a rotary embedding takes them
from an argument: both must be equal. ``forward_analysis`` reads the forward passes inside a decoder
layer. This module reads the forward passes above the decoder layers, which loop over layers or wrap
another model: every call that leads to the layers must pass the positions unchanged; code that does
not touch the positions may do anything.
"""

import ast
import inspect
import textwrap
from collections.abc import Sequence
from typing import Any

from torch.nn import Module, ModuleList

from vllm_fp4_plugin.fusion.forward_analysis import flow_of_parameter

POSITIONS = "positions"  # name of the argument in vLLM's models
_READ = frozenset({"device", "dtype", "ndim", "numel", "shape", "size"})


def unsupported_reason(owners: Sequence[Any], rotary_name: str) -> str:
    """Reason why an embedding's positions may differ from attention's; empty if they cannot.

    Args:
        owners: modules around the embedding, the innermost first, the whole model last.
        rotary_name: name of the embedding in the first of ``owners``.
    """
    name = rotary_name
    for depth, owner in enumerate(owners):
        if depth:
            below = owners[depth - 1]
            names = [n for n, module in owner._modules.items() if module is below]
            if len(names) != 1:
                return _above(owners, depth)
            [name] = names
        flow = flow_of_parameter(owner, POSITIONS)
        places = {use.parameter for use in flow.uses if use.attribute == name}
        if flow.escape or name in flow.without or not places or not places <= {0, POSITIONS}:
            return _above(owners, depth) if depth > 1 else _note(owner, name)
    return ""


def _note(owner: Any, name: str) -> str:
    return f"{type(owner).__name__} is not seen to hand its positions on to {name}"


def _above(owners: Sequence[Any], depth: int) -> str:
    """Reason why ``owners[depth]`` or a module around it may change positions; else empty."""
    for place in range(depth, len(owners)):
        inside = owners[:place]
        if type(owners[place]).forward is Module.forward:
            continue  # a plain container, which is never called
        try:
            hands_on = _Reader(owners[place], inside).hands_on()
        except _NotUnderstood as reason:
            return f"{type(owners[place]).__name__}.forward {reason}"
        if not hands_on:
            return _note(owners[place], type(inside[-1]).__name__)
    return ""


def _is_text(node: ast.AST | None, text: str) -> bool:
    return isinstance(node, ast.Constant) and node.value == text


class _NotUnderstood(Exception):
    """Signal that a forward pass may change the positions or cannot be read; with the reason."""


class _Reader:
    """Reader of one forward pass, which must pass the positions on unchanged.

    Args:
        owner: module of the forward pass.
        inside: modules inside the owner that lead to the embedding, the innermost first.
    """

    def __init__(self, owner: Any, inside: Sequence[Any]) -> None:
        self.owner = owner
        self.inside = inside
        self.layers: set[str] = set()  # local names of list elements (layers)
        self.modules: dict[str, Any] = {}  # local names of other modules
        self.named: set[str] = set()  # local names of keyword dicts that include the positions

    def hands_on(self) -> bool:
        """Whether there are calls of modules in ``inside``, and all pass the positions.

        Raises:
            _NotUnderstood: the source cannot be read, or may change or rename the positions.
        """
        function = self._function()
        parents = {id(c): p for p in ast.walk(function) for c in ast.iter_child_nodes(p)}
        for node in ast.walk(function):
            self._note(node)
        for node in ast.walk(function):
            if isinstance(node, ast.Name) and node.id == POSITIONS:
                self._check(node, parents[id(node)])
            elif isinstance(node, ast.Name) and node.id in self.named:
                self._check_named(node, parents)
        calls = [c for c in ast.walk(function) if isinstance(c, ast.Call) and self._leads(c.func)]
        return bool(calls) and all(map(self._is_given, calls))

    def _note(self, node: ast.AST) -> None:
        """Record the local name that a node binds to a module or to a dict with the positions."""
        match node:
            case (
                ast.For(iter=iterated, target=target)
                | ast.comprehension(iter=iterated, target=target)
            ) if self._is_over_layers(iterated):
                self.layers |= {n.id for n in ast.walk(target) if isinstance(n, ast.Name)}
            case ast.Assign(targets=[ast.Name(id=name)], value=ast.Subscript() as value) if (
                self._leads(value)
            ):
                self.layers.add(name)
            case ast.Assign(targets=[ast.Name(id=name)], value=ast.Dict(keys=keys)) if any(
                _is_text(key, POSITIONS) for key in keys
            ):
                if name in self.named:
                    raise _NotUnderstood(f"makes {name} twice")
                self.named.add(name)
            case ast.Assign(targets=[ast.Name(id=name)], value=value) if (
                module := self._module_of(value)
            ) is not None:
                if self.modules.setdefault(name, module) is not module:
                    raise _NotUnderstood(f"calls two modules {name}")

    def _function(self) -> ast.FunctionDef:
        try:
            # Keep the indentation: dedenting would change multi-line strings.
            source = "if 1:\n" + inspect.getsource(type(self.owner).forward)
            [block] = ast.parse(source).body
            [function] = block.body if isinstance(block, ast.If) else []
        except (OSError, TypeError, ValueError, SyntaxError):
            raise _NotUnderstood("has no source that can be read") from None
        if not isinstance(function, ast.FunctionDef):
            raise _NotUnderstood("is no plain method")
        given = function.args
        if POSITIONS not in {a.arg for a in (*given.posonlyargs, *given.args, *given.kwonlyargs)}:
            raise _NotUnderstood(f"takes no {POSITIONS}")
        self.self_name = given.args[0].arg
        return function

    def _check(self, name: ast.Name, parent: ast.AST) -> None:
        """Raise if a use of ``positions`` could change or rename the positions."""
        match parent:
            case _ if not isinstance(name.ctx, ast.Load):
                pass
            case ast.Call(args=args) if name in args:
                return
            case ast.keyword() | ast.Compare(ops=[ast.Is() | ast.IsNot()]):
                return
            case ast.Dict(keys=keys, values=values):
                pairs = zip(keys, values, strict=True)
                if all(_is_text(key, POSITIONS) for key, value in pairs if value is name):
                    return
            case ast.Attribute(attr=attr) if attr in _READ:
                return
        text = textwrap.shorten(ast.unparse(parent), 60, placeholder=" …")
        raise _NotUnderstood(f"may change its positions ({text})")

    def _check_named(self, name: ast.Name, parents: dict[int, ast.AST]) -> None:
        """Raise if a use of a keyword dict could change the positions in the dict."""
        parent = parents[id(name)]
        match parent:
            case ast.keyword(arg=None) | ast.Assign():
                return
            case ast.Subscript(slice=ast.Constant() as key) if not _is_text(key, POSITIONS):
                return
            case ast.Attribute(attr="update"):
                call = parents[id(parent)]
                given = call.args if isinstance(call, ast.Call) and not call.keywords else [None]
                dicts = [each for each in given if isinstance(each, ast.Dict)]
                keys = [key for each in dicts for key in each.keys]
                known = all(isinstance(k, ast.Constant) and k.value != POSITIONS for k in keys)
                if len(dicts) == len(given) and known:
                    return
        raise _NotUnderstood(f"may change its positions ({ast.unparse(parent)})")

    def _is_over_layers(self, iterated: ast.expr) -> bool:
        lists = (self._module_of(node) for node in ast.walk(iterated))
        return any(isinstance(each, ModuleList) and self._holds(each) for each in lists)

    def _holds(self, layers: ModuleList) -> bool:
        return any(layer is module for layer in layers for module in self.inside)

    def _leads(self, callee: ast.expr) -> bool:
        """Whether a callee is a module in ``inside``, or an element of a list that holds one."""
        match callee:
            case ast.Name(id=name) if name in self.layers:
                return True
            case ast.Subscript(value=value):
                module = self._module_of(value)
                return isinstance(module, ModuleList) and self._holds(module)
        module = self._module_of(callee)
        return module is not None and any(module is each for each in self.inside)

    def _module_of(self, node: ast.AST) -> Any:
        """Module that an expression such as ``self.language_model.model`` refers to, or None."""
        match node:
            case ast.Name(id=name):
                return self.owner if name == self.self_name else self.modules.get(name)
            case ast.Attribute(value=value, attr=attr):
                module = self._module_of(value)
                return module._modules.get(attr) if isinstance(module, Module) else None
        return None

    def _is_given(self, call: ast.Call) -> bool:
        """Whether a call passes the positions once, as the callee's parameter ``positions``."""
        callee = self._callee(call.func)
        if callee is None:
            return False
        named = [
            each.value
            for each in call.keywords
            if each.arg == POSITIONS or (each.arg is None and self._is_named(each.value))
        ]
        places = list(inspect.signature(type(callee).forward).parameters)[1:]
        if POSITIONS not in places or any(isinstance(each, ast.Starred) for each in call.args):
            given = named
        else:
            place = places.index(POSITIONS)
            given = [*call.args[place : place + 1], *named]
        known = {POSITIONS, *self.named}
        return [isinstance(each, ast.Name) and each.id in known for each in given] == [True]

    def _is_named(self, node: ast.expr) -> bool:
        return isinstance(node, ast.Name) and node.id in self.named

    def _callee(self, func: ast.expr) -> Any:
        """Module that ``func``, the function of a call, refers to; None if unknown.

        For a layer in a loop: the layer that leads to the embedding.
        """
        module = self._module_of(func)
        if module is not None:
            return module
        lists = [m for m in self.owner.modules() if isinstance(m, ModuleList) and self._holds(m)]
        nearest = [layer for each in lists for layer in each for m in self.inside if layer is m]
        return nearest[0] if nearest else None
