"""Checkpoint names of a model's tensors, guessed from the names of neighbouring tensors."""

from collections import defaultdict
from collections.abc import Iterable, Iterator

_GUESSES = 6  # maximum number of names guessed for a tensor


class CheckpointNames:
    """Guesser of checkpoint names from received names and vLLM's parameter names.

    Args:
        came: names of the tensors received from the checkpoint.
        parameters: names of the model's parameters.
    """

    def __init__(self, came: Iterable[str], parameters: Iterable[str]) -> None:
        self._came = _by_ending(came)
        self._parameters = list(parameters)
        self._by_ending = _by_ending(self._parameters)

    def guesses(self, name: str) -> list[str]:
        """Checkpoint names that a model's tensor may have, likeliest first; the model's name last.

        A neighbouring parameter that came under another name reveals the checkpoint's module name.
        """
        found: dict[str, None] = {}
        path = name.split(".")
        for depth in range(len(path) - 1, -1, -1):
            prefix = "".join(f"{part}." for part in path[:depth])
            rest = ".".join(path[depth:])
            for parameter in self._parameters:
                if parameter.startswith(prefix) and parameter != name:
                    ending = parameter.removeprefix(prefix)
                    for module in self._modules(parameter, ending):
                        found[module + rest] = None
                if len(found) >= _GUESSES:
                    break
        return [*list(found)[:_GUESSES], *([] if name in found else [name])]

    def likeliest(self, name: str) -> str:
        """Likeliest checkpoint name of a tensor."""
        return self.guesses(name)[0]

    def _modules(self, parameter: str, ending: str) -> Iterator[str]:
        """Yield prefixes, up to ``ending``, of the received names that match ``parameter`` best.

        Such a name shares the most trailing parts with ``parameter``, and no more with any other
        parameter.
        """
        same = self._came.get(ending, ())
        longest = max((_common(parameter, name) for name in same), default=0)
        for name in same:
            alike = _common(parameter, name)
            others = self._by_ending.get(ending, ())
            is_anothers = any(_common(other, name) > alike for other in others)
            if alike == longest and not is_anothers:
                yield name.removesuffix(ending)


def _by_ending(names: Iterable[str]) -> dict[str, list[str]]:
    """Names, indexed by each of their dot-separated suffixes."""
    found: dict[str, list[str]] = defaultdict(list)
    for name in names:
        parts = name.split(".")
        for first in range(len(parts)):
            found[".".join(parts[first:])].append(name)
    return found


def _common(one: str, other: str) -> int:
    """Number of trailing dot-separated parts that two names share."""
    count = 0
    for a, b in zip(reversed(one.split(".")), reversed(other.split(".")), strict=False):
        if a != b:
            break
        count += 1
    return count
