"""Quantization schemes that a checkpoint's config declares for its layers."""

from collections.abc import Iterable
from dataclasses import replace
from typing import Any

from vllm_fp4_plugin.formats import CheckpointConfig, LayerGroup
from vllm_fp4_plugin.formats.kind import Kind
from vllm_fp4_plugin.ignore import matches, paths_within

UNQUANTIZED = LayerGroup("the config", Kind.UNQUANTIZED)


class DeclaredKinds:
    """Config groups, looked up by module name.

    A module that ``ignore`` covers is unquantised. For other modules the first match counts: a
    group with the module's path among its targets (see ``ignore.matches``), the longest path first;
    a group with a matching wildcard or regex; the group without targets, which covers every other
    linear. Among equal matches the earlier group counts.
    """

    def __init__(self, checkpoint: CheckpointConfig) -> None:
        self._ignore = checkpoint.ignore
        self._groups = checkpoint.declared
        self._is_silent = checkpoint.is_silent
        self._index()

    def _index(self) -> None:
        """Index ``ignore`` and the targets, so that thousands of names need no search."""
        self._ignored_names = {pattern for pattern in self._ignore if not _is_pattern(pattern)}
        self._ignored_patterns = [pattern for pattern in self._ignore if _is_pattern(pattern)]
        self._names: dict[str, LayerGroup] = {}
        self._patterns: list[tuple[str, LayerGroup]] = []
        for group in self._groups:
            for target in group.targets or ():
                if _is_pattern(target):
                    self._patterns.append((target, group))
                else:
                    self._names.setdefault(target, group)
        self._rest = next((group for group in self._groups if group.targets is None), None)

    def ignored_by(self, name: str) -> str | None:
        """Find a pattern of ``ignore`` that covers a module; None if there is none."""
        named = (path for path in paths_within(name) if path in self._ignored_names)
        return next(named, None) or matches(name, self._ignored_patterns)

    def group_of(self, name: str) -> LayerGroup | None:
        """Find the group of a module; ``UNQUANTIZED`` if ignored, or in no group.

        None: the module is not ignored, and the config lists no schemes
        (``CheckpointConfig.is_silent``).
        """
        if self.ignored_by(name) is not None:
            return UNQUANTIZED
        if self._is_silent:
            return None
        return self._named(name) or self._rest or UNQUANTIZED

    def mentions(self, name: str) -> bool:
        """Whether ``ignore`` or the targets of a group cover a module."""
        return self.ignored_by(name) is not None or self._named(name) is not None

    def _named(self, name: str) -> LayerGroup | None:
        for path in paths_within(name) if self._names else ():
            group = self._names.get(path)
            if group is not None:
                return group
        return next((g for target, g in self._patterns if matches(name, [target])), None)

    def rename(self, mapper: Any) -> None:
        """Rename targets and patterns to the module names that vLLM's ``mapper`` gives."""
        self._ignore = renamed(self._ignore, mapper)
        self._groups = tuple(
            group
            if group.targets is None
            else replace(group, targets=renamed(group.targets, mapper))
            for group in self._groups
        )
        self._index()


def _is_pattern(target: str) -> bool:
    return target.startswith("re:") or any(c in target for c in "*?[")


def renamed(patterns: Iterable[str], mapper: Any) -> tuple[str, ...]:
    """Rename names and wildcards; keep regexes, which have no prefix for the mapper's rules."""
    return tuple(
        pattern if pattern.startswith("re:") else renamed_module(pattern, mapper)
        for pattern in patterns
    )


def renamed_module(name: str, mapper: Any) -> str:
    """Module name after renaming by vLLM's ``mapper``, whose rules apply to tensor names.

    A rule such as ``"lm_head."`` only matches names below the module, so the function maps the name
    of the module's weight and cuts off the last part.
    """
    for below in (f"{name}.weight", name):
        mapped: str | None = mapper.map_name(below)
        if mapped is not None and mapped.endswith(below[len(name) :]):
            return mapped[: len(mapped) - len(below) + len(name)]
    return name
