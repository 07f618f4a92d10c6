"""Results of a run, as written to JSON."""

from dataclasses import asdict, dataclass
from typing import Any

from examples.perplexity import Interval
from examples.sensitivity.deviation import Deviation
from examples.sensitivity.groups import Group


@dataclass(frozen=True)
class GroupResult:
    """Result of one layer.

    Attributes:
        group: linears and bytes of the layer.
        weight_error: ‖dequantised - original‖² / ‖original‖², by rule of the block scales.
        kl: mean divergence, in nats, with this layer alone quantised.
        log_perplexity: increase of the log-perplexity, with this layer alone quantised.
        ignored: whether the layer is on the list.
        kl_with_terms: mean divergence by number of NVFP4 terms of the inputs, for the numbers that
            did not decide the list; key 0: 16-bit inputs.
    """

    group: Group
    weight_error: dict[str, float]
    kl: Interval
    log_perplexity: Interval
    ignored: bool
    kl_with_terms: dict[int, Interval]


@dataclass(frozen=True)
class Whole:
    """Result for a model with several quantised layers, on the windows that a list is judged on.

    Attributes:
        bits_per_weight: mean over the linears of decoder layers, including linears in 16 bits.
        nbytes: bytes of the linears of decoder layers.
        kl: mean divergence from the 16-bit model, in nats.
        log_perplexity: increase of the log-perplexity over the 16-bit model.
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
    """Results of a whole run.

    Attributes:
        about: model, options, versions, machine.
        perplexity: perplexity of the 16-bit model, on the windows a list is judged on.
        tokens: number of tokens predicted in those windows.
        rule: rule of the measured block scales.
        groups: every layer, in the model's order, on all windows.
        quantised: model with all layers quantised.
        quantised_with_terms: model with all layers quantised, by number of NVFP4 terms of the
            inputs, for the numbers that did not decide the list.
        with_list: model with all layers quantised except the list.
        kl_won: divergence of ``quantised`` minus divergence of ``with_list``, window by window.
        log_perplexity_won: log-perplexity of ``quantised`` minus that of ``with_list``.
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
