"""``python -m examples.throughput.worker JOB PROGRESS``: process that times one engine."""

import random
import sys
import time
from pathlib import Path
from typing import Any

from examples.throughput.cases import Case
from examples.throughput.job import Job, Progress


def prompts(case: Case, vocabulary: int, seed: int) -> list[list[int]]:
    """Random token ids of each prompt of a case, equal for all variants of one vocabulary size."""
    numbers = random.Random(f"{seed} {case.name}")
    # Low ids are special tokens in many vocabularies.
    low = min(100, vocabulary // 2)
    return [
        [numbers.randrange(low, vocabulary) for _ in range(case.prompt_tokens)]
        for _ in range(case.batch)
    ]


def generate(llm: Any, case: Case, ids: list[list[int]]) -> float:
    """Generate the outputs of a batch; return the seconds that the engine took.

    Raises:
        RuntimeError: an output does not have the requested length.
    """
    from vllm import SamplingParams

    sampling = SamplingParams(
        temperature=0.0, max_tokens=case.output_tokens, ignore_eos=True, detokenize=False
    )
    requests = [{"prompt_token_ids": row} for row in ids]
    started = time.perf_counter()
    outputs = llm.generate(requests, sampling, use_tqdm=False)
    seconds = time.perf_counter() - started
    lengths = {len(output.outputs[0].token_ids) for output in outputs}
    if len(outputs) != case.batch or lengths != {case.output_tokens}:
        raise RuntimeError(
            f"{case.name}: {len(outputs)} outputs of {sorted(lengths)} tokens came back, must be "
            f"{case.batch} of {case.output_tokens}; nothing can be said of their speed"
        )
    return seconds


def run(job: Job, file: Path) -> None:
    """Start the engine and measure every case; ``file`` receives the progress."""
    progress = Progress(state="starting the engine", total=len(job.cases) * (1 + job.repeats))
    progress.write(file)
    try:
        started = time.perf_counter()
        from vllm import LLM
        from vllm.platforms import current_platform

        llm = LLM(**job.engine_args)
        progress.engine_seconds = time.perf_counter() - started
        progress.device = str(current_platform.get_device_name())
        vocabulary = llm.llm_engine.model_config.get_vocab_size()
        for case in job.cases:
            ids = prompts(case, vocabulary, job.seed)
            times = progress.seconds.setdefault(case.name, [])
            for repeat in range(1 + job.repeats):
                progress.state = f"{case.title}: " + (
                    f"{repeat} of {job.repeats}" if repeat else "warm-up"
                )
                progress.write(file)
                seconds = generate(llm, case, ids)
                if repeat:  # the first repeat compiles, captures and tunes
                    times.append(seconds)
                progress.done += 1
        progress.state, progress.finished = "done", True
    except BaseException as error:
        first_line = (str(error).splitlines() or [""])[0]
        progress.error = f"{type(error).__name__}: {first_line}"
        raise
    finally:
        progress.write(file)


if __name__ == "__main__":
    run(Job.read(Path(sys.argv[1])), Path(sys.argv[2]))
