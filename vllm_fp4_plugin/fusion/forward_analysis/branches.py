"""Outcomes of a method's tests that are the same in every run."""

import ast
from collections.abc import Hashable, Iterable, Mapping

from vllm_fp4_plugin.fusion.module_constants import decided


class Branches:
    """Evaluator of tests on constants, and on parameters known not to be None.

    Args:
        self_name: name of the method's ``self`` parameter.
        constants: instance attributes used in tests, with their values.
        not_none: parameters that are not None.
    """

    def __init__(
        self, self_name: str, constants: Mapping[str, Hashable], not_none: Iterable[str]
    ) -> None:
        self._self_name = self_name
        self._constants = constants
        self._not_none = set(not_none)

    def outcome(self, test: ast.expr) -> bool | None:
        """Outcome of a test if it is the same in every run; None if it may differ."""
        if self._compares_with_none(test):
            return isinstance(test, ast.Compare) and isinstance(test.ops[0], ast.IsNot)
        return decided(test, self._self_name, self._constants)

    def assign(self, *names: str) -> None:
        """Forget that these parameters are not None: they are assigned to."""
        self._not_none -= {*names}

    def forget(self, statement: ast.stmt) -> None:
        """Forget which parameters are not None, if a statement may assign to them."""
        if isinstance(statement, ast.Try | ast.Match):
            self._not_none.clear()
        for node in ast.walk(statement):
            if isinstance(node, ast.Name) and not isinstance(node.ctx, ast.Load):
                self.assign(node.id)

    def _compares_with_none(self, test: ast.expr) -> bool:
        """Whether a test is ``p is None`` or ``p is not None``, for p in ``not_none``."""
        match test:
            case ast.Compare(
                left=ast.Name(id=name), ops=[ast.Is() | ast.IsNot()],
                comparators=[ast.Constant(value=None)],
            ):  # fmt: skip
                return name in self._not_none
        return False
