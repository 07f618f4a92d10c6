"""Results of a run, as written to JSON."""

from dataclasses import asdict, dataclass
from typing import Any

from examples.perplexity import Interval
from examples.sensitivity.deviation import Deviation
from examples.sensitivity.groups import Group


@dataclass(frozen=True)
class GroupResult:
    """One layer.

    Attributes:
        group: its linears and bytes.
        weight_error: ‖dequantised - original‖² / ‖original‖² by rule of scales.
        kl: mean divergence, in nats, when it alone is quantised.
        log_perplexity: by how much that rises then.
        ignored: whether it is on the list.
        kl_with_terms: the divergence with other numbers of terms of its inputs; 0: 16-bit inputs.
    """

    group: Group
    weight_error: dict[str, float]
    kl: Interval
    log_perplexity: Interval
    ignored: bool
    kl_with_terms: dict[int, Interval]


@dataclass(frozen=True)
class Whole:
    """A model of which several layers are quantised, on the windows a list is judged on.

    Attributes:
        bits_per_weight: mean over the linears of decoder layers, those in 16 bits too.
        nbytes: of those linears.
        kl: mean divergence from the 16-bit model, in nats.
        log_perplexity: by how much it is above the 16-bit model's.
    """

    bits_per_weight: float
    nbytes: int
    kl: Interval
    log_perplexity: Interval

    @classmethod
    def of(cls, deviation: Deviation, bits: float, nbytes: int) -> "Whole":
        """Summarise a measured deviation."""
        return cls(bits, nbytes, deviation.kl, deviation.log_perplexity)


@dataclass(frozen=True)
class Results:
    """A whole run.

    Attributes:
        about: model, options, versions, machine.
        perplexity: of the 16-bit model, on the windows a list is judged on.
        tokens: predicted in those windows.
        rule: of the block scales that were measured.
        groups: every layer, in the model's order, on all windows.
        quantised: all layers quantised.
        quantised_with_terms: the same with other numbers of terms of the inputs.
        with_list: all but those on the list.
        kl_won: the difference of the two, window by window.
        log_perplexity_won: likewise.
    """

    about: dict[str, Any]
    perplexity: float
    tokens: int
    rule: str
    groups: list[GroupResult]
    quantised: Whole
    quantised_with_terms: dict[int, Whole]
    with_list: Whole
    kl_won: Interval
    log_perplexity_won: Interval

    @property
    def ignored(self) -> list[GroupResult]:
        """The layers on the list, in the model's order."""
        return [row for row in self.groups if row.ignored]

    def as_json(self) -> dict[str, Any]:
        """Plain values, for JSON."""
        return asdict(self)
