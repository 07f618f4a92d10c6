"""Branch conditions whose outcome is the same in every run of a method."""

import ast
from collections.abc import Hashable, Iterable, Mapping

from vllm_fp4_plugin.fusion.module_constants import decided


class Branches:
    """Evaluator of branch conditions on constants, and on parameters known not to be None.

    Args:
        self_name: name of the method's ``self`` parameter.
        constants: instance attributes used in conditions, with their values.
        not_none: names of parameters that are not None on entry.
    """

    def __init__(
        self, self_name: str, constants: Mapping[str, Hashable], not_none: Iterable[str]
    ) -> None:
        self._self_name = self_name
        self._constants = constants
        self._not_none = set(not_none)

    def outcome(self, test: ast.expr) -> bool | None:
        """Outcome of a condition; None if the outcome may differ between runs."""
        if self._compares_with_none(test):
            return isinstance(test, ast.Compare) and isinstance(test.ops[0], ast.IsNot)
        return decided(test, self._self_name, self._constants)

    def assign(self, *names: str) -> None:
        """Mark the parameters among ``names``, which are assigned to, as possibly None."""
        self._not_none -= {*names}

    def forget(self, statement: ast.stmt) -> None:
        """Mark parameters as possibly None if a statement may assign to them."""
        if isinstance(statement, ast.Try | ast.Match):
            self._not_none.clear()
        for node in ast.walk(statement):
            if isinstance(node, ast.Name) and not isinstance(node.ctx, ast.Load):
                self.assign(node.id)

    def _compares_with_none(self, test: ast.expr) -> bool:
        """Whether a condition is ``p is None`` or ``p is not None``, for p known not to be None."""
        match test:
            case ast.Compare(
                left=ast.Name(id=name), ops=[ast.Is() | ast.IsNot()],
                comparators=[ast.Constant(value=None)],
            ):  # fmt: skip
                return name in self._not_none
        return False
