"""Patterns that select layers, also fused ones, by name: module paths, wildcards, regexes."""

import re
from collections.abc import Iterable, Iterator, Mapping
from fnmatch import fnmatchcase


class MixedShards(ValueError):
    """Error for a fused layer with only some of its shards quantised."""


class InvalidPattern(ValueError):
    """Error for a pattern ``re:…`` without a valid regular expression."""


def check_pattern(argument: str, pattern: str) -> None:
    """Refuse a pattern that ``matches`` cannot parse; ``argument`` is the pattern's source.

    Raises:
        InvalidPattern: ``re:`` is followed by an invalid regular expression.
    """
    if pattern.startswith("re:"):
        try:
            re.compile(pattern[3:])
        except re.error as error:
            raise InvalidPattern(
                f"{argument}: {pattern!r} is no regular expression ({error}), must be one after "
                "re:; escape what is to stand for itself, or name the module"
            ) from error


def matches(name: str, patterns: Iterable[str]) -> str | None:
    """Find the first pattern that covers the module ``name``; None if there is none.

    A pattern is ``re:<regex>`` (matched from the start), a ``*`` wildcard over the whole name, or a
    module path, which covers the module and everything below, and may omit leading parts
    (``lm_head``, ``self_attn.q_proj``). Parts are compared whole: ``mlp.gate`` does not cover
    ``mlp.gate_up_proj``.
    """
    parts = name.split(".")
    for pattern in patterns:
        if pattern.startswith("re:"):
            if re.match(pattern[3:], name):
                return pattern
        elif fnmatchcase(name, pattern) or _is_path_within(pattern.split("."), parts):
            return pattern
    return None


def paths_within(name: str) -> Iterator[str]:
    """Module paths that would cover ``name`` as patterns (see ``matches``), the longest first."""
    parts = name.split(".")
    for length in range(len(parts), 0, -1):
        for first in range(len(parts) - length + 1):
            yield ".".join(parts[first : first + length])


def _is_path_within(path: list[str], parts: list[str]) -> bool:
    width = len(path)
    return any(parts[i : i + width] == path for i in range(len(parts) - width + 1))


def shard_names(name: str, packed_modules: Mapping[str, list[str]]) -> list[str]:
    """Names of a fused layer's shards, as in a checkpoint; ``[name]`` for any other layer.

    ``packed_modules``: last parts of the shards' names, by last part of the fused layer's name.
    """
    parent, _, last = name.rpartition(".")
    shards = packed_modules.get(last, [last])
    return [f"{parent}.{s}" if parent else s for s in shards]


def covered(
    name: str, patterns: Iterable[str], packed_modules: Mapping[str, list[str]]
) -> str | None:
    """Find the pattern that covers a layer of the model, or else its shards; None if there is none.

    If several patterns cover the shards, the first shard's is returned.

    Raises:
        MixedShards: only some of the shards are covered.
    """
    patterns = list(patterns)
    if (whole := matches(name, patterns)) is not None:
        return whole
    shards = shard_names(name, packed_modules)
    found = {shard: matches(shard, patterns) for shard in shards}
    hits = [pattern for pattern in found.values() if pattern is not None]
    if hits and len(hits) < len(shards):
        covered_shards = [s for s, p in found.items() if p is not None]
        raise MixedShards(
            f"{name}: {', '.join(hits)} covers only {', '.join(covered_shards)} of its shards; a "
            "fused layer is quantised whole or not at all, so list all or none of them"
        )
    return hits[0] if hits else None
