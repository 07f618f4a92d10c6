"""Loops of a model over the decoder layers of its rank."""

import ast
import itertools

from vllm_fp4_plugin.fusion.forward_analysis.method_source import MethodSource

_ENDS = ("start_layer", "end_layer")  # attributes of vLLM's models: range of layers on this rank


def layer_variable(source: MethodSource, layers: str, target: ast.expr, iterated: ast.expr) -> str:
    """Name of a loop's variable if the loop goes over all decoder layers of the rank; else "".

    Args:
        source: source of the method that has the loop.
        layers: attribute of ``self`` that is the list of layers.
        target: target of the loop.
        iterated: iterable of the loop.
    """
    match iterated, target:
        case (
            ast.Call(func=ast.Name(id="enumerate"), args=[inner, *_]),
            ast.Tuple(elts=[ast.Name(), ast.Name(id=name)]),
        ) if source.means("enumerate", enumerate):
            return name if _is_over_layers(source, layers, inner) else ""
        case _, ast.Name(id=name):
            return name if _is_over_layers(source, layers, iterated) else ""
    return ""


def _is_over_layers(source: MethodSource, layers: str, node: ast.expr) -> bool:
    match node:
        case ast.Call(func=ast.Name(id=name), args=[owned, *ends], keywords=[]) if source.means(
            name, itertools.islice
        ):
            return source.is_own(owned, layers) and _are_ends(source, ends)
        case ast.Subscript(
            value=owned,
            slice=ast.Slice(lower=ast.expr() as first, upper=ast.expr() as last, step=step),
        ):
            is_list = source.is_own(owned, layers)
            return step is None and is_list and _are_ends(source, [first, last])
    return source.is_own(node, layers)


def _are_ends(source: MethodSource, ends: list[ast.expr]) -> bool:
    return len(ends) == len(_ENDS) and all(map(source.is_own, ends, _ENDS))
