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
    """Call of one of the owner's attributes with the value as an argument, or return of the value.

    Attributes:
        attribute: name of the attribute; ``RETURNED``: ``forward`` returns the value.
        parameter: position or name of the argument that is the value; of a return, 0 (first of a
            pair) or ``ALONE``.
    """

    attribute: str
    parameter: Parameter


@dataclass(frozen=True)
class Flow:
    """Uses of a value in a forward pass.

    Attributes:
        uses: calls and returns that take the value; empty if the value escapes.
        escape: description of the first escape; empty if the value does not escape.
        without: attributes of the owner with a call that does not take the value; ``RETURNED`` if
            something else is returned.
        alone: attributes of the owner with a call whose only argument is the value.
        arguments: for each call of the producer, positions or names of the arguments in order;
            None for ``*`` and ``**``.
        despite: if the value escapes, the uses found nevertheless; for reports.
    """

    uses: frozenset[Use]
    escape: str
    without: frozenset[str] = field(default=frozenset(), compare=False)
    alone: frozenset[str] = field(default=frozenset(), compare=False)
    arguments: frozenset[tuple[Parameter | None, ...]] = field(default=frozenset(), compare=False)
    despite: frozenset[Use] = field(default=frozenset(), compare=False)

    @property
    def consumers(self) -> frozenset[str]:
        """Attributes of the owner that are called with the value; ``RETURNED`` if returned."""
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
    """Query of the analysis; see ``flow_of``, ``flow_of_parameter`` and ``flow_of_layers``.

    Attributes:
        producer: attribute of the submodule whose result is followed; empty if a parameter is
            followed.
        returns: return convention of the submodule.
        as_input: see ``flow_of``.
        as_tensor: see ``flow_of``.
        may_return: see ``flow_of``.
        parameter: parameter of ``forward`` that is followed; None: a result is followed.
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
    """Signal of an escape: a use of the value or its producer that is not known to be harmless."""


class Tracked(Enum):
    """Relation of a name or expression to the followed value; None stands for no relation."""

    RESULT = "result"
    PAIR = "pair"  # pair of the value and something else
    LAYER = "layer"  # the producer, as a loop variable over a list
    SOMETIMES = "sometimes"  # depends on the path taken


State = dict[str, Tracked]  # local names that hold a part of the value
