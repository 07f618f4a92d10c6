"""Results of a comparison, as JSON, and the derived figures."""

import json
import statistics
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from examples.atomic_write import write_atomically
from examples.paths import read_results
from examples.throughput.cases import Case


@dataclass
class VariantResult:
    """Results of one variant over all rounds.

    Attributes:
        name: name of the variant.
        model: served model.
        engine_args: arguments of the engine.
        rounds: seconds of each repeat, by the case's name; a dictionary for each round that ran.
        kernels: lines of the log that name the kernels that ran.
        device: device, as reported by vLLM.
        engine_seconds: time until the engine was ready, in each round.
        errors: errors of failed rounds, as one line each.
        logs: paths of the rounds' logs, relative to the folder of the results.
    """

    name: str
    model: str
    engine_args: dict[str, Any] = field(default_factory=dict)
    rounds: list[dict[str, list[float]]] = field(default_factory=list)
    kernels: list[str] = field(default_factory=list)
    device: str = ""
    engine_seconds: list[float] = field(default_factory=list)
    errors: list[str] = field(default_factory=list)
    logs: list[str] = field(default_factory=list)

    def rates(self, case: Case) -> list[float]:
        """Tokens per second in every repeat of every round."""
        return [case.tokens / s for one in self.rounds for s in one.get(case.name, [])]

    def runs_references(self) -> bool:
        """Whether a reference kernel ran, according to the kernel names in the log's lines."""
        kernels = (line.partition(": ")[2].partition(",")[0] for line in self.kernels)
        return any("/reference" in kernel for kernel in kernels)

    def is_of_a_cpu(self) -> bool:
        """Whether the variant ran on a CPU, according to vLLM's device name."""
        return self.device.lower().startswith("cpu")


@dataclass(frozen=True)
class Rate:
    """Rate of one variant in one case.

    Attributes:
        median: tokens per second.
        spread: half of the range between the slowest and the fastest repeat, as a share of the
            median.
        ratio: ratio to the baseline's median; None if the baseline has no rate in the case.
    """

    median: float
    spread: float
    ratio: float | None


@dataclass
class Results:
    """Results of one run of the comparison.

    Attributes:
        about: versions, commit, machine, options.
        cases: measured cases.
        baseline: name of the variant that the others are compared with.
        variants: variants in the given order.
    """

    about: dict[str, Any]
    cases: tuple[Case, ...]
    baseline: str
    variants: list[VariantResult]

    def write(self, file: Path) -> None:
        """Write as JSON; a reader sees the old file or the new one."""
        write_atomically(file, json.dumps(asdict(self), indent=1) + "\n")

    @classmethod
    def read(cls, file: Path) -> "Results":
        """Read a file written by :meth:`write`.

        Raises:
            ValueError: the file cannot be read, or does not hold results.
        """
        text = read_results(file, "python -m examples.throughput measure")
        try:
            fields = json.loads(text)
            fields["cases"] = tuple(Case(**case) for case in fields["cases"])
            fields["variants"] = [VariantResult(**variant) for variant in fields["variants"]]
            return cls(**fields)
        except (KeyError, TypeError, ValueError) as error:
            raise ValueError(
                f"{file}: holds no results ({error}), must be written by "
                "`python -m examples.throughput measure`; measure again"
            ) from error

    def warning(self) -> str:
        """Warning that the speeds do not represent a GPU; empty if they do."""
        if any(variant.runs_references() for variant in self.variants):
            return "Reference kernels are exact, not fast: these are no GPU speeds."
        if any(variant.is_of_a_cpu() for variant in self.variants):
            return "Measured on a CPU: these are no GPU speeds."
        return ""

    def variant(self, name: str) -> VariantResult:
        """The variant of the given name."""
        [found] = [variant for variant in self.variants if variant.name == name]
        return found

    def rate(self, variant: VariantResult, case: Case) -> Rate | None:
        """A variant's rate in a case; None if not measured."""
        rates = variant.rates(case)
        if not rates:
            return None
        median = statistics.median(rates)
        beside = self.variant(self.baseline).rates(case)
        ratio = median / statistics.median(beside) if beside else None
        return Rate(median, (max(rates) - min(rates)) / 2 / median, ratio)
