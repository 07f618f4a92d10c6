"""Results of a run, as JSON, and the derived figures."""

import json
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from examples.atomic_write import write_atomically
from examples.kernel_bench.layers import BenchLayer
from examples.kernel_bench.operands import LARGEST_ERROR
from examples.paths import read_results

CONTENDERS = ("ours", "w4a8", "humming", "marlin", "fp8", "bf16")


@dataclass(frozen=True)
class Sample:
    """Result of one contender at one layer and number of tokens.

    Attributes:
        layer: name of the layer.
        m: number of tokens.
        contender: name of the contender.
        median_us, least_us, most_us: microseconds of a launch, over the replays.
        launches: number of launches in each replay, on the copies of the weight in turn.
        copies: number of copies of the weight.
        nbytes: bytes that must move in a launch.
        flops: number of multiplications and additions of a launch.
        error: largest difference from the exact result, as a share of the exact result's largest
            magnitude.
        refused: reason why nothing was measured; empty otherwise.
    """

    layer: str
    m: int
    contender: str
    median_us: float = 0.0
    least_us: float = 0.0
    most_us: float = 0.0
    launches: int = 0
    copies: int = 0
    nbytes: float = 0.0
    flops: float = 0.0
    error: float = 0.0
    refused: str = ""

    @property
    def wrong(self) -> bool:
        """Whether the result is off by more than the tolerance; NaN is wrong too."""
        return not self.refused and not self.error <= LARGEST_ERROR


@dataclass
class Results:
    """Results of a run of the benchmark.

    Attributes:
        about: versions, commit, GPU, options.
        read_bytes_per_second: memory read rate, measured in the same run.
        bf16_flops_per_second: rate of cuBLAS at a large square product, measured in the same run.
        layers: measured layers.
        notes: omissions and their reasons.
        samples: samples in the order of measurement.
    """

    about: dict[str, Any]
    read_bytes_per_second: float
    bf16_flops_per_second: float
    layers: list[BenchLayer]
    notes: list[str] = field(default_factory=list)
    samples: list[Sample] = field(default_factory=list)

    def write(self, file: Path) -> None:
        """Write as JSON; a reader sees the old file or the new one."""
        write_atomically(file, json.dumps(asdict(self), indent=1) + "\n")

    @classmethod
    def read(cls, file: Path) -> "Results":
        """Read a file written by :meth:`write`.

        Raises:
            ValueError: the file cannot be read, or does not hold results.
        """
        text = read_results(file, "python -m examples.kernel_bench measure")
        try:
            fields = json.loads(text)
            fields["layers"] = [
                BenchLayer(**layer | {"shard_sizes": tuple(layer["shard_sizes"])})
                for layer in fields["layers"]
            ]
            fields["samples"] = [Sample(**sample) for sample in fields["samples"]]
            return cls(**fields)
        except (KeyError, TypeError, ValueError) as error:
            raise ValueError(
                f"{file}: holds no results ({error}), must be written by "
                "`python -m examples.kernel_bench measure`; measure again"
            ) from error

    @property
    def contenders(self) -> list[str]:
        """Names of the contenders, in order of measurement."""
        return list(dict.fromkeys(sample.contender for sample in self.samples))

    def of_layer(self, layer: str) -> dict[int, dict[str, Sample]]:
        """Samples of a layer: by number of tokens, then by contender."""
        found: dict[int, dict[str, Sample]] = {}
        for sample in self.samples:
            if sample.layer == layer:
                found.setdefault(sample.m, {})[sample.contender] = sample
        return found

    def read_share(self, sample: Sample) -> float:
        """Fraction of the memory's measured read rate that a sample achieves."""
        return sample.nbytes / (sample.median_us * 1e-6) / self.read_bytes_per_second

    def flops_share(self, sample: Sample) -> float:
        """Fraction of cuBLAS's measured bfloat16 rate that a sample achieves."""
        return sample.flops / (sample.median_us * 1e-6) / self.bf16_flops_per_second


def speed_up(of: Sample | None, over: Sample | None) -> float | None:
    """Speed-up of one sample over another; None if either is missing, refused or wrong."""
    if any(s is None or s.refused or s.wrong for s in (of, over)):
        return None
    assert of is not None
    assert over is not None
    return over.median_us / of.median_us
