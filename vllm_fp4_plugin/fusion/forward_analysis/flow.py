"""Queries of the escape analysis, and their answers."""

from dataclasses import dataclass, field
from enum import Enum
from typing import Literal, NamedTuple

# Return convention of a submodule: its result; a pair whose first or second element is the result;
# or, as for norms, the result without a residual, and with one a pair of result and new residual.
Returns = Literal["result", "pair", "second", "norm"]
Parameter = int | str  # argument of a call: its position, or its name

# A ``Use`` without a call: ``forward`` returns the value, as the first of a pair (0) or alone.
RETURNED = "return"
ALONE = "alone"


class Use(NamedTuple):
    """Call of one of the owner's attributes with the value as an argument.

    Attributes:
        attribute: name of the attribute.
        parameter: position or name of the argument that is the value.
    """

    attribute: str
    parameter: Parameter


@dataclass(frozen=True)
class Flow:
    """Uses of a value in a forward pass.

    Attributes:
        uses: calls that receive the value.
        escape: description of the first escape; empty if the value does not escape.
        without: attributes of the owner that any method calls without the value.
        alone: attributes of the owner that are called with the value as the only argument.
        arguments: for each call of the producer, positions or names of its arguments in order.
        despite: calls with a value that escapes, as far as they can be followed; for reports.
    """

    uses: frozenset[Use]
    escape: str
    without: frozenset[str] = field(default=frozenset(), compare=False)
    alone: frozenset[str] = field(default=frozenset(), compare=False)
    arguments: frozenset[tuple[Parameter | None, ...]] = field(default=frozenset(), compare=False)
    despite: frozenset[Use] = field(default=frozenset(), compare=False)

    @property
    def consumers(self) -> frozenset[str]:
        """Attributes of the owner that are called with the value."""
        return frozenset(use.attribute for use in self.uses)

    @property
    def called_otherwise(self) -> str:
        """Reason against fusion: a consumer is also called without the value; else empty."""
        names = self.consumers & self.without
        if RETURNED in names:
            return "something else is returned too"
        return f"{' and '.join(sorted(names))} is called with something else too" if names else ""


@dataclass(frozen=True)
class Query:
    """Query of the analysis; see ``flow_of`` and its siblings.

    Attributes:
        producer: submodule whose result is followed; empty if a parameter is followed.
        returns: return convention of the producer.
        as_input: see ``flow_of``.
        as_tensor: see ``flow_of``.
        may_return: see ``flow_of``.
        parameter: parameter of ``forward`` that is followed.
        not_none: see ``flow_of_parameter``.
        looped: whether the producer is a list of layers, see ``flow_of_layers``.
    """

    producer: str
    returns: Returns
    as_input: bool
    as_tensor: bool = False
    may_return: bool = False
    parameter: Parameter | None = None
    not_none: frozenset[str] = frozenset()
    looped: bool = False


class EscapeError(Exception):
    """Escape: a use of the tracked value, or of its producer, that is not known to be harmless."""


class Tracked(Enum):
    """Part of the tracked value that a name or expression holds; None stands for no part."""

    RESULT = "result"
    PAIR = "pair"  # pair of the value and something else
    LAYER = "layer"  # the producer, as a loop variable over a list
    SOMETIMES = "sometimes"  # depends on the path taken


State = dict[str, Tracked]  # local names that hold a part of the value
