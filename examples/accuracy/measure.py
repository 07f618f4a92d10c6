"""Measurement of the reference, the yardsticks and every variant in turn, with verdicts."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from examples.accuracy.checkpoints import checkpoint_of
from examples.accuracy.distributions import DistributionError
from examples.accuracy.flags import served_flags, weight_flags
from examples.accuracy.harness import HarnessError
from examples.accuracy.results import Results, VariantResult
from examples.accuracy.serving import AtServer, Bench, windows_of
from examples.accuracy.variants import REFERENCE, YARDSTICKS, Variant, known_variants, yardsticks
from examples.accuracy.weight_error import weight_errors
from examples.engine_log import root_cause
from examples.quantize import QuantizeError
from examples.server import ServerError
from examples.stages import Stage
from vllm_fp4_plugin.quantizer.errors import QuantizerError


@dataclass
class Comparison:
    """Running comparison of a model's variants, with the results so far.

    Attributes:
        model: 16-bit checkpoint.
        calibration: text for variants whose files need calibration.
        bench: bench that measures the variants.
        gpu: whether the servers run on a GPU.
        results: results, filled variant by variant.
        file: file of the results, written after each variant.
    """

    model: Path
    calibration: Path | None
    bench: Bench
    gpu: bool
    results: Results
    file: Path

    def measure(self, variants: Sequence[Variant]) -> None:
        """Measure ``variants``, the reference and the yardsticks.

        A variant that fails gets an error in its result. If the reference cannot be measured on the
        text, or there are no variants, nothing but the reference is measured.
        """
        reference = self._reference()
        if reference is None or not variants:
            return
        self._yardsticks(reference, [v for v in variants if v.input_format])
        for variant in (v for v in variants if v.input_format is None):
            result = self._result(variant)
            if variant.needs_gpu and not self.gpu:
                result.errors.append("vLLM has kernels for it on GPUs alone; measure it on one")
            else:
                with self._failing(result, variant), self._at_server(result, variant) as server:
                    result.weights = weight_errors(server.checkpoint, self.model)
                    _keep(result, server.windows(reference))
                    self._score(result, server)
            judge(result, self.results)
            self.results.write(self.file)

    def _reference(self) -> Stage | None:
        variant = known_variants("")[REFERENCE]
        result = self._result(variant)
        stage = None
        with self._failing(result, variant), self._at_server(result, variant) as server:
            stage = server.windows(None)
            _keep(result, stage)
            self._score(result, server)
        self.results.write(self.file)
        return stage

    def _yardsticks(self, reference: Stage, more: Sequence[Variant]) -> None:
        variants = (*yardsticks(), *more)
        first, *rest = results = [self._result(variant) for variant in variants]
        with self._failing(first, variants[0]), self._at_server(first, variants[0]) as server:
            for variant, result in zip(variants, results, strict=True):
                _keep(result, server.windows(reference, variant.input_format or 0))
        for result in rest:
            result.checkpoint = first.checkpoint
        self.results.write(self.file)

    def _result(self, variant: Variant) -> VariantResult:
        result = VariantResult(variant.name, variant.title, variant.rounds)
        self.results.variants.append(result)
        return result

    @contextmanager
    def _at_server(self, result: VariantResult, variant: Variant) -> Iterator[AtServer]:
        checkpoint, content = checkpoint_of(
            variant, self.model, self.calibration, self.bench.stages
        )
        result.checkpoint = str(checkpoint)
        with self.bench.at_server(variant, checkpoint, content) as server:
            yield server

    def _score(self, result: VariantResult, server: AtServer) -> None:
        if self.bench.settings.tasks:
            result.tasks = server.scores()

    @contextmanager
    def _failing(self, result: VariantResult, variant: Variant) -> Iterator[None]:
        """Context that turns exceptions into errors of the variant's result."""
        try:
            yield
        except ServerError as error:
            log = self.bench.log(variant)
            text = log.read_text(encoding="utf-8", errors="replace") if log.is_file() else ""
            told = " ".join(str(error).partition("\nlast lines of")[0].split())
            result.errors.append(f"{root_cause(text) or told} ({log})")
        except (
            DistributionError, HarnessError, QuantizeError, QuantizerError, OSError, ValueError
        ) as error:  # fmt: skip
            result.errors.append(f"{type(error).__name__}: {error}")


def judge(result: VariantResult, results: Results) -> None:
    """Set a variant's flags, from its weight errors and, if all yardsticks ran, its divergence."""
    result.flags = weight_flags(result.weights)
    named = {name: results.named(name) for name in YARDSTICKS}
    explained = {name: found.kl for name, found in named.items() if found and found.kl}
    if result.kl and len(explained) == len(YARDSTICKS):
        result.flags += served_flags(result.kl, result.rounds, explained)


def _keep(result: VariantResult, stage: Stage) -> None:
    result.windows, result.kernels, result.ready_seconds = windows_of(stage)
