"""Names that a model's tensors have in a checkpoint, guessed from those of their neighbours."""

from collections import defaultdict
from collections.abc import Iterable, Iterator

_GUESSES = 6  # names for a tensor


class CheckpointNames:
    """Names in a checkpoint, beside those that vLLM's model has for the same tensors.

    Args:
        came: names of the checkpoint's tensors.
        parameters: names of the model's.
    """

    def __init__(self, came: Iterable[str], parameters: Iterable[str]) -> None:
        self._came = _by_ending(came)
        self._parameters = list(parameters)
        self._by_ending = _by_ending(self._parameters)

    def guesses(self, name: str) -> list[str]:
        """Names that a tensor of the model may have, the likeliest first; the model's comes last.

        A parameter beside it that came under another name tells what its module is called there.
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
        """Name that a tensor has, as far as its neighbours tell."""
        return self.guesses(name)[0]

    def _modules(self, parameter: str, ending: str) -> Iterator[str]:
        """Beginnings, before an ending, of the names that a parameter may have come under."""
        same = self._came.get(ending, ())
        longest = max((_common(parameter, name) for name in same), default=0)
        for name in same:
            alike = _common(parameter, name)
            others = self._by_ending.get(ending, ())
            is_anothers = any(_common(other, name) > alike for other in others)
            if alike == longest and not is_anothers:
                yield name.removesuffix(ending)


def _by_ending(names: Iterable[str]) -> dict[str, list[str]]:
    """Names by each of their endings that starts with a whole part."""
    found: dict[str, list[str]] = defaultdict(list)
    for name in names:
        parts = name.split(".")
        for first in range(len(parts)):
            found[".".join(parts[first:])].append(name)
    return found


def _common(one: str, other: str) -> int:
    """Number of parts that two names have in common at their ends."""
    count = 0
    for a, b in zip(reversed(one.split(".")), reversed(other.split(".")), strict=False):
        if a != b:
            break
        count += 1
    return count
