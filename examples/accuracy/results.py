"""Results of a comparison, stored as JSON, and the derived figures."""

import json
import math
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from examples.accuracy.distributions import Windows
from examples.accuracy.harness import TaskScore
from examples.accuracy.variants import REFERENCE, Rounds
from examples.accuracy.weight_error import WeightError
from examples.atomic_write import write_atomically
from examples.paths import read_results
from examples.perplexity import Interval, mean_interval

_Z = 1.96  # quantile of a normal distribution for a 95% interval


@dataclass
class VariantResult:
    """Results of one variant.

    Attributes:
        name, title, rounds: as in the ``Variant``.
        checkpoint: folder the variant was served from.
        windows: measurements on the text's windows; None if not measured.
        tasks: scores of lm-evaluation-harness.
        weights: errors of each NVFP4 linear of the variant's files.
        kernels: lines of the log that name the kernels that ran.
        ready_seconds: seconds until the server was ready.
        errors: reasons why the variant was not, or only partly, measured.
        flags: reasons why the variant is wrong.
    """

    name: str
    title: str
    rounds: Rounds
    checkpoint: str = ""
    windows: Windows | None = None
    tasks: list[TaskScore] = field(default_factory=list)
    weights: list[WeightError] = field(default_factory=list)
    kernels: list[str] = field(default_factory=list)
    ready_seconds: float = 0.0
    errors: list[str] = field(default_factory=list)
    flags: list[str] = field(default_factory=list)

    @property
    def perplexity(self) -> float | None:
        """Perplexity of the text."""
        return math.exp(-float(np.mean(self.windows.logprob))) if self.windows else None

    @property
    def kl(self) -> Interval | None:
        """Divergence from the reference, in nats per token."""
        return mean_interval(np.array(self.windows.kl)) if self.windows else None

    @property
    def agreement(self) -> Interval | None:
        """Share of tokens with the same top-1 token as the reference."""
        return mean_interval(np.array(self.windows.agreement)) if self.windows else None


@dataclass
class Results:
    """Results of a run; ``about`` holds versions, commit, machine and options."""

    about: dict[str, Any]
    variants: list[VariantResult] = field(default_factory=list)

    def write(self, file: Path) -> None:
        """Write as JSON, with the derived figures; a reader sees the old file or the new one."""
        fields = asdict(self)
        for variant, written in zip(self.variants, fields["variants"], strict=True):
            written["figures"] = self._figures(variant)
            for score in written["tasks"]:  # JSON has no NaN
                score["stderr"] = None if math.isnan(score["stderr"]) else score["stderr"]
        write_atomically(file, json.dumps(fields, indent=1) + "\n")

    @classmethod
    def read(cls, file: Path) -> "Results":
        """Read a file written by :meth:`write`.

        Raises:
            ValueError: the file cannot be read, or does not hold results.
        """
        text = read_results(file, "python -m examples.accuracy measure")
        try:
            fields = json.loads(text)
            return cls(fields["about"], [_variant(v) for v in fields["variants"]])
        except (KeyError, TypeError, ValueError) as error:
            raise ValueError(
                f"{file}: holds no results ({error}), must be written by "
                "`python -m examples.accuracy measure`; measure again"
            ) from error

    def named(self, name: str) -> VariantResult | None:
        """The variant of the given name, or None."""
        return next((variant for variant in self.variants if variant.name == name), None)

    def difference(self, variant: VariantResult) -> Interval | None:
        """Increase of the variant's log-perplexity over the reference's."""
        reference = self.named(REFERENCE)
        if variant.windows is None or reference is None or reference.windows is None:
            return None
        return mean_interval(np.subtract(reference.windows.logprob, variant.windows.logprob))

    @property
    def tasks(self) -> list[tuple[str, str]]:
        """Every task and metric with a score in some variant."""
        return list(dict.fromkeys((s.task, s.metric) for v in self.variants for s in v.tasks))

    @property
    def failed(self) -> bool:
        """Whether a variant is wrong, or could not be measured."""
        return any(variant.errors or variant.flags for variant in self.variants)

    def _figures(self, variant: VariantResult) -> dict[str, Any]:
        intervals = {
            "log_perplexity_difference": self.difference(variant),
            "kl": variant.kl,
            "agreement": variant.agreement,
        }
        return {
            "perplexity": variant.perplexity,
            **{name: asdict(found) if found else None for name, found in intervals.items()},
        }


def task_interval(score: TaskScore) -> Interval:
    """A score's 95% interval: Wilson's, which suits shares near 0 or 1, for a share of documents.

    For other metrics, ± 1.96 of the harness's standard errors; width 0 if the harness gives none.
    """
    share, count = score.value, score.samples
    if 0 <= share <= 1 and count > 1:
        of_a_share = math.sqrt(share * (1 - share) / (count - 1))
        if math.isclose(score.stderr, of_a_share, abs_tol=1e-6):
            return _wilson(share, count)
    half = 0.0 if math.isnan(score.stderr) else _Z * score.stderr
    return Interval(share, share - half, share + half)


def _wilson(share: float, count: int) -> Interval:
    """Interval of a share after E. B. Wilson, "Probable inference ..." (1927)."""
    square = _Z**2 / count
    middle = (share + square / 2) / (1 + square)
    half = _Z / (1 + square) * math.sqrt(share * (1 - share) / count + square / 4 / count)
    return Interval(share, max(0.0, middle - half), min(1.0, middle + half))


def _variant(fields: dict[str, Any]) -> VariantResult:
    fields.pop("figures")
    fields["windows"] = Windows(**fields["windows"]) if fields["windows"] else None
    fields["tasks"] = [_score(score) for score in fields["tasks"]]
    fields["weights"] = [WeightError(**error) for error in fields["weights"]]
    return VariantResult(**fields)


def _score(fields: dict[str, Any]) -> TaskScore:
    return TaskScore(
        **fields | {"stderr": math.nan if fields["stderr"] is None else fields["stderr"]}
    )
