"""Measurement of the variants' engines in turn, round by round."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from examples.throughput.cases import BadOption, Case
from examples.throughput.job import Job, Progress
from examples.throughput.process import Outcome, run_job
from examples.throughput.results import Results, VariantResult
from examples.throughput.variants import Variant

_SET_BY = {
    "model": "MODEL",
    "quantization": "--quantization",
    "max_model_len": "--max-model-len",
    "gpu_memory_utilization": "--gpu-memory-utilization",
    "tensor_parallel_size": "--tensor-parallel-size",
    "enforce_eager": "--enforce-eager",
}


@dataclass(frozen=True)
class Settings:
    """Settings that variants are measured with.

    Attributes:
        repeats: timed repeats of each case in each round.
        rounds: number of rounds; each round starts every variant once.
        seed: seed of the prompts.
        time_limit: seconds for one engine, including its start.
    """

    repeats: int = 3
    rounds: int = 1
    seed: int = 0
    time_limit: float = 3600.0


def engine_args(
    cases: Sequence[Case],
    *,
    max_model_len: int | None,
    gpu_memory_utilization: float,
    tensor_parallel_size: int,
    enforce_eager: bool,
    more: Mapping[str, Any],
) -> dict[str, Any]:
    """Arguments of ``vllm.LLM`` that all variants share, with ``more``, which overrides defaults.

    Raises:
        BadOption: a case is longer than ``max_model_len``, ``gpu_memory_utilization`` is out of
            range, or ``more`` has an argument that another option sets.
    """
    for name in more:
        if name in _SET_BY:
            raise BadOption(
                f"--engine-args: holds {name!r}, which {_SET_BY[name]} sets; give it there"
            )
    longest = max(case.length for case in cases)
    if max_model_len is not None and max_model_len < longest:
        raise BadOption(
            f"--max-model-len: is {max_model_len}, must be at least {longest}, which the longest "
            "request comes to; leave it out"
        )
    if not 0 < gpu_memory_utilization <= 1:
        raise BadOption(
            f"--gpu-memory-utilization: is {gpu_memory_utilization}, must be above 0 and at most 1"
        )
    return {
        "dtype": "bfloat16",
        "max_model_len": max_model_len or longest,
        "max_num_seqs": max(case.batch for case in cases),
        "gpu_memory_utilization": gpu_memory_utilization,
        "tensor_parallel_size": tensor_parallel_size,
        "enforce_eager": enforce_eager,
        # Prompts are token ids, and repeat: no tokenizer, no cached prefix.
        "skip_tokenizer_init": True,
        "enable_prefix_caching": False,
        "generation_config": "vllm",
        "disable_log_stats": True,
        **more,
    }


def measure(
    results: Results,
    variants: Sequence[Variant],
    engine: Mapping[str, Any],
    settings: Settings,
    folder: Path,
    on_progress: Callable[[str, int, Progress], None],
    on_outcome: Callable[[str, Outcome], None],
) -> None:
    """Add every variant's rounds to ``results``, and write the results after each round.

    Args:
        results: results with a ``VariantResult`` for each of ``variants``.
        variants: variants to compare; a failure of one variant does not stop the others.
        engine: arguments of ``vllm.LLM`` that all variants share; override a variant's own.
        settings: repeats, rounds and limits.
        folder: folder for ``results.json`` and for ``engines/`` with the logs.
        on_progress: called with the variant's name, the number of the round, and the progress.
        on_outcome: called with the variant's name and the outcome after each of the variant's
            rounds.
    """
    engines = folder / "engines"
    engines.mkdir(parents=True, exist_ok=True)
    with TemporaryDirectory() as models:
        args = {
            variant.name: {
                "model": variant.written(Path(models)), **variant.engine_args(), **engine
            }
            for variant in variants
        }  # fmt: skip
        for number in range(1, settings.rounds + 1):
            for variant in variants:
                job = Job(args[variant.name], results.cases, settings.repeats, settings.seed)
                outcome = run_job(
                    job,
                    engines,
                    f"{variant.name}-{number}",
                    settings.time_limit,
                    lambda progress, name=variant.name, number=number: on_progress(  # type: ignore[misc]
                        name, number, progress
                    ),
                )
                _add(results.variant(variant.name), job, outcome, folder)
                results.write(folder / "results.json")
                on_outcome(variant.name, outcome)


def _add(result: VariantResult, job: Job, outcome: Outcome, folder: Path) -> None:
    result.engine_args = {k: v for k, v in job.engine_args.items() if k != "model"}
    result.rounds.append(outcome.progress.seconds)
    result.engine_seconds.append(outcome.progress.engine_seconds)
    result.device = outcome.progress.device or result.device
    result.kernels += [line for line in outcome.kernels if line not in result.kernels]
    result.logs.append(str(outcome.log.relative_to(folder)))
    if outcome.error:
        result.errors.append(outcome.error)
