"""Scores of lm-evaluation-harness, run against a server."""

import json
import math
import os
import re
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import httpx

from examples.accuracy import tasks as local
from examples.completions import connect
from examples.engine_log import root_cause

ROOT = Path(__file__).parents[2]
REQUESTS_AT_ONCE = 16
# For the server: HumanEval stops at five strings, vLLM's own limit is four.
SERVER_ENVIRONMENT = {"VLLM_MAX_STOP_STRINGS": "16"}
_REFUSED = re.compile(r"failed! Status code: (?P<status>\d+), Response text: (?P<text>.{1,400})")


class HarnessError(RuntimeError):
    """Error for lm-evaluation-harness: missing, unable to run the request, or failed."""


@dataclass(frozen=True)
class TaskScore:
    """A metric of a task, over ``samples`` documents.

    Attributes:
        task: name of a task or of a group.
        metric: name in the harness, followed by a comma and the filter unless that is ``none``.
        value: value of the metric over all documents, usually a mean.
        stderr: standard error of the mean, as estimated by the harness; NaN without an estimate.
        samples: number of documents.
    """

    task: str
    metric: str
    value: float
    stderr: float
    samples: int


def score(
    base_url: str,
    model: str,
    tokenizer: Path,
    tasks: Sequence[str],
    folder: Path,
    limit: int | None,
    made: Path | None = None,
    log: Path | None = None,
) -> list[TaskScore]:
    """Run tasks against a server.

    Prompts are sent as token ids, with the tokenizer's special tokens before every text. Nothing is
    downloaded unless a task of the harness itself downloads data.

    Args:
        base_url: URL of vLLM's OpenAI-style server, without ``/v1``.
        model: served name of the model.
        tokenizer: folder of the model's tokenizer.
        tasks: names of our tasks (``tasks.NAMES``), or of the harness's tasks and groups; tasks
            that execute the model's output need ``HF_ALLOW_CODE_EVAL=1`` in the environment.
        folder: folder for ``results_*.json`` and ``samples_*.jsonl`` of the harness.
        limit: number of documents of each task, from the first; None: all.
        made: folder of ``make_tasks``; None: our tasks are made in ``folder/tasks``.
        log: file for the harness's output; None: ``harness.log`` in ``folder``.

    Raises:
        HarnessError: the run failed; the message gives the reason in one line.
    """
    _check_installed()
    folder.mkdir(parents=True, exist_ok=True)
    ours = set(tasks) & set(local.NAMES)
    if ours and made is None:
        made = folder / "tasks"
        try:
            local.make_tasks(made)
        except (OSError, ValueError) as error:
            raise HarnessError(f"{', '.join(sorted(ours))}: {error}") from error
    job = {
        "model_args": {
            "model": model,
            "base_url": f"{base_url}/v1/completions",
            "tokenizer": str(tokenizer),
            "tokenizer_backend": "huggingface",
            "add_bos_token": True,  # if the tokenizer adds BOS
            "num_concurrent": REQUESTS_AT_ONCE,
            "max_length": _context_length(base_url, model),
        },
        "tasks": list(dict.fromkeys(tasks)),
        "include_path": str(made) if made else None,
        "include_defaults": not set(tasks) <= ours,
        "limit": limit,
        "confirm_run_unsafe_code": os.environ.get("HF_ALLOW_CODE_EVAL") == "1",
        "output_path": str(folder / "results.json"),
    }
    results = _run(job, folder, log or folder / "harness.log")
    return list(task_scores(results))


def unknown_tasks(tasks: Sequence[str], made: Path | None = None) -> list[str]:
    """Names in ``tasks`` unknown to the harness, to ``made`` and to our tasks; needs no server.

    Takes seconds unless all names are those of our tasks: the harness reads all its task files.
    ``made`` is a folder of ``make_tasks``.

    Raises:
        HarnessError: lm-evaluation-harness is missing or broken.
    """
    _check_installed()
    foreign = [task for task in tasks if task not in local.NAMES]
    if not foreign:
        return []
    asked = subprocess.run(
        [sys.executable, "-m", "examples.accuracy.unknown_tasks", str(made or ""), *foreign],
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        env={**os.environ, "NO_COLOR": "1"},
        cwd=ROOT,
        check=False,
    )
    if asked.returncode:
        raise HarnessError(
            f"lm-evaluation-harness: cannot list its tasks: {_why(asked.stderr.strip())}"
        )
    return list(json.loads(asked.stdout.splitlines()[-1]))


def _check_installed() -> None:
    if find_spec("lm_eval") is None:
        raise HarnessError(
            "lm_eval: is not installed, tasks need it; install the extra `eval` of vllm-fp4-plugin"
        )


def task_scores(results: Mapping[str, Any]) -> Iterator[TaskScore]:
    """Scores in the harness's results, without the tasks of a group that has a score itself."""
    subtasks = results["group_subtasks"]
    grouped = {
        task
        for group, children in subtasks.items()
        if any(_metrics(results["results"].get(group, {})))
        for task in children
    }
    for task, fields in results["results"].items():
        if task in grouped:
            continue
        for name, value, stderr in _metrics(fields):
            yield TaskScore(task, name, value, stderr, int(fields["sample_len"]))


def _metrics(fields: Mapping[str, Any]) -> Iterator[tuple[str, float, float]]:
    for key, value in fields.items():
        metric, comma, chosen = key.partition(",")
        if not comma or metric.endswith("_stderr") or not isinstance(value, int | float):
            continue
        stderr = fields.get(f"{metric}_stderr,{chosen}")
        name = metric if chosen == "none" else key
        yield name, float(value), float(stderr) if isinstance(stderr, int | float) else math.nan


def _context_length(base_url: str, model: str) -> int:
    """Maximum number of tokens that the server accepts for a prompt with its answer."""
    try:
        with connect(base_url) as client:
            served = client.get("/v1/models").raise_for_status().json()["data"]
    except (httpx.HTTPError, KeyError, ValueError) as error:
        raise HarnessError(f"{base_url}: does not tell what it serves: {error}") from error
    lengths = {entry["id"]: entry.get("max_model_len") for entry in served}
    if not lengths.get(model):
        raise HarnessError(
            f"model: is {model}, must be one that the server at {base_url} tells the length of: "
            f"{', '.join(name for name, length in lengths.items() if length) or 'none'}"
        )
    return int(lengths[model])


def _run(job: dict[str, Any], folder: Path, log: Path) -> dict[str, Any]:
    """Results of the harness for ``job``, run in a separate process."""
    job_file = folder / "job.json"
    log.parent.mkdir(parents=True, exist_ok=True)
    job_file.write_text(json.dumps(job, indent=1) + "\n")
    earlier = set(folder.glob("results_*.json"))
    with tempfile.TemporaryDirectory() as home, log.open("wb") as output:
        offline = {"HF_HUB_OFFLINE": "1", "HF_DATASETS_OFFLINE": "1", "HF_HOME": home}
        code = subprocess.run(
            [sys.executable, "-m", "examples.accuracy.harness_worker", str(job_file)],
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=subprocess.STDOUT,
            env={**os.environ, "NO_COLOR": "1", **({} if job["include_defaults"] else offline)},
            cwd=ROOT,
            check=False,
        ).returncode
    files = set(folder.glob("results_*.json")) - earlier
    if code or len(files) != 1:
        why = _why(log.read_text(encoding="utf-8", errors="replace").strip())
        raise HarnessError(
            f"lm-evaluation-harness: ended with status {code} and {len(files)} files of results: "
            f"{why} (all of its output: {log})"
        )
    return json.loads(files.pop().read_text())


def _why(log: str) -> str:
    """Reason of a failure: the server's first refusal, else the first error, else the last line."""
    if refused := _REFUSED.search(log):
        return f"the server answered {refused['status']}: {refused['text']}"
    return root_cause(log) or (log.splitlines()[-1] if log else "it printed nothing")
