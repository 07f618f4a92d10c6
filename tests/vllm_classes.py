"""Classes of vLLM's models, each compiled from its source, because most modules need a GPU."""

import ast
import builtins
import re
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
import vllm
from torch.nn import Module
from vllm.model_executor.layers.fusion.fused_act_quant import maybe_fused_act_quant

ROOT = Path(vllm.__file__).parent
_PREFIX = "model_executor/models/"
_KNOWN = {
    "F": torch.nn.functional,
    "Callable": Callable,
    "maybe_fused_act_quant": maybe_fused_act_quant,
    "nn": torch.nn,
    "torch": torch,
}


def classes_with(text: str) -> Iterator[tuple[str, type[Module]]]:
    """Classes of vLLM's models whose source contains a text, by ``file:class``."""
    for file in sorted((*ROOT.glob("models/**/*.py"), *ROOT.glob("model_executor/models/**/*.py"))):
        source = file.read_text()
        if text not in source:
            continue
        for node in ast.walk(ast.parse(source)):
            if isinstance(node, ast.ClassDef) and text in ast.unparse(node):
                name = file.relative_to(ROOT).with_suffix("").as_posix()
                yield f"{name.removeprefix(_PREFIX)}:{node.name}", _built(node, file)


def has_class(name: str) -> bool:
    """Whether the installed vLLM has a class, given as ``file:class``."""
    module, _, wanted = name.partition(":")
    file = (ROOT / (module if "/" in module else _PREFIX + module)).with_suffix(".py")
    return file.exists() and re.search(rf"^class {wanted}\b", file.read_text(), re.M) is not None


def _built(node: ast.ClassDef, file: Path) -> type[Module]:
    """Class compiled from its definition, so that ``inspect`` finds the methods' source.

    Names from the class's module are replaced by ``Any``, and only torch's base classes are kept.
    """
    names = {each.id for each in ast.walk(node) if isinstance(each, ast.Name)}
    namespace: dict[str, Any] = dict.fromkeys(names - set(vars(builtins)), Any) | _KNOWN
    exec(compile(ast.Module([node], []), str(file), "exec"), namespace)
    return namespace[node.name]
