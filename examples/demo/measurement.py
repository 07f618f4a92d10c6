"""Measurements of one model, over HTTP, from a real server."""

import json
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass
from pathlib import Path

import numpy as np

from examples.completions import Completion, complete, connect, token_logprobs
from examples.demo.kernel_report import LayerKernel, parse_kernel_report
from examples.server import Server

# No prompt ends in a space or a line break: the tokenizer joins trailing space to the next word.
PROMPTS = (
    'def read_lines(path, encoding="utf-8"):\n    """',
    "class Queue:\n    def __init__(self, maxsize=0):",
    "    for name in os.listdir(path):",
    'class ParseError(Exception):\n    """',
    "    def close(self):",
    "    if not isinstance(value,",
    "    try:\n        return",
    "The methods of this class",
)
ALONE = 4  # prompts sent one at a time; afterwards all prompts are sent at once
WINDOWS_AT_ONCE = 4


@dataclass(frozen=True)
class Measurement:
    """Measurements of one server.

    Attributes:
        completions: completions of the prompts sent one at a time.
        tokens_per_second: generated tokens per second with one request at a time.
        tokens_per_second_at_once: generated tokens per second with all requests in flight at once.
        logprobs: natural log-probabilities of each held-out window's tokens after the first,
            ``(windows, tokens - 1)``.
        kernels: kernel of every layer; empty for a model that is not quantised.
        ready_seconds: time from the server's start until its first healthy answer.
    """

    completions: list[Completion]
    tokens_per_second: float
    tokens_per_second_at_once: float
    logprobs: list[list[float]]
    kernels: list[LayerKernel]
    ready_seconds: float

    def write(self, file: Path) -> None:
        """Write as JSON."""
        file.write_text(json.dumps(asdict(self)) + "\n")

    @classmethod
    def read(cls, file: Path) -> "Measurement":
        """Read a file written by :meth:`write`."""
        fields = json.loads(file.read_text())
        fields["completions"] = [Completion(**c) for c in fields["completions"]]
        fields["kernels"] = [LayerKernel(**k) for k in fields["kernels"]]
        return cls(**fields)


def measure(
    server: Server,
    windows: np.ndarray,
    max_tokens: int,
    quantised: bool,
    on_window: Callable[[], None] = lambda: None,
) -> Measurement:
    """Measure a running server: completions, and log-probabilities of held-out text.

    Args:
        server: a ready server.
        windows: held-out token ids, ``(windows, tokens)``.
        max_tokens: number of tokens to generate for each prompt.
        quantised: whether the log must report the kernel of each layer.
        on_window: called after each window.

    Raises:
        httpx.HTTPError: a request fails.
        ValueError: ``quantised`` is set and the log reports no kernels.
    """
    log = server.log.read_text(encoding="utf-8", errors="replace")
    kernels = parse_kernel_report(log) if quantised else []
    with connect(server.url) as client:
        # The first step of every batch size is slow: these are not timed.
        complete(client, PROMPTS, max_tokens, at_once=len(PROMPTS))
        alone = complete(client, PROMPTS[:ALONE], max_tokens, at_once=1)
        together = complete(client, PROMPTS, max_tokens, at_once=len(PROMPTS))
        with ThreadPoolExecutor(WINDOWS_AT_ONCE) as pool:
            logprobs = []
            for row in pool.map(lambda window: token_logprobs(client, window), windows):
                logprobs.append(row.tolist())
                on_window()
    return Measurement(
        completions=alone.completions,
        tokens_per_second=alone.tokens_per_second,
        tokens_per_second_at_once=together.tokens_per_second,
        logprobs=logprobs,
        kernels=kernels,
        ready_seconds=server.ready_seconds,
    )
