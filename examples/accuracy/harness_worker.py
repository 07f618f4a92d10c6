"""``python -m examples.accuracy.harness_worker JOB``: run lm-evaluation-harness once.

Equivalent to the harness's command, but does not read the harness's 14,000 task files if only
our tasks are requested.
"""

import json
import sys
from pathlib import Path


def main(job_file: Path) -> None:
    """Run the job in ``job_file``; results and samples go to the folder of its ``output_path``."""
    from lm_eval import simple_evaluate
    from lm_eval.loggers import EvaluationTracker
    from lm_eval.tasks import TaskManager
    from lm_eval.utils import setup_logging

    setup_logging("INFO")
    job = json.loads(job_file.read_text())
    tracker = EvaluationTracker(output_path=job["output_path"])
    results = simple_evaluate(
        model="local-completions",
        model_args=job["model_args"],
        tasks=job["tasks"],
        limit=job["limit"],
        log_samples=True,
        evaluation_tracker=tracker,
        task_manager=TaskManager(
            include_path=job["include_path"],
            include_defaults=job["include_defaults"],
            metadata=job["model_args"],
        ),
        confirm_run_unsafe_code=job["confirm_run_unsafe_code"],
    )
    samples = results.pop("samples")
    tracker.save_results_aggregated(results, samples)
    for task in results["configs"]:
        tracker.save_results_samples(task, samples[task])


if __name__ == "__main__":
    main(Path(sys.argv[1]))
