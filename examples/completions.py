"""Requests to an OpenAI-style server, as any client would send them."""

import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

import httpx
import numpy as np

from examples.server import MODEL_NAME

TIMEOUT = 120  # seconds for one request

# With greedy sampling, a model this small repeats itself; speeds compare only if every completion
# has the same length.
SAMPLING = {"temperature": 0.7, "seed": 0, "ignore_eos": True}


@dataclass(frozen=True)
class Completion:
    """A prompt, and its continuation by the model: ``text`` of ``tokens`` tokens."""

    prompt: str
    text: str
    tokens: int


@dataclass(frozen=True)
class Batch:
    """Completions in the order of their prompts, and the seconds until all were complete."""

    completions: list[Completion]
    seconds: float

    @property
    def tokens_per_second(self) -> float:
        """Generated tokens of all completions per second of wall time."""
        return sum(c.tokens for c in self.completions) / self.seconds


def connect(url: str) -> httpx.Client:
    """A client of the server at ``url``, without the environment's proxies."""
    return httpx.Client(base_url=url, timeout=TIMEOUT, trust_env=False)


def complete(client: httpx.Client, prompts: Sequence[str], max_tokens: int, at_once: int) -> Batch:
    """Complete every prompt, sampled with a fixed seed.

    Args:
        client: client of the server.
        prompts: texts to continue.
        max_tokens: number of tokens to generate for each prompt.
        at_once: maximum number of requests in flight.

    Raises:
        httpx.HTTPError: a request fails.
    """

    def one(prompt: str) -> Completion:
        answer = _post(client, {"prompt": prompt, "max_tokens": max_tokens, **SAMPLING})
        return Completion(
            prompt, answer["choices"][0]["text"], answer["usage"]["completion_tokens"]
        )

    start = time.monotonic()
    with ThreadPoolExecutor(at_once) as pool:
        completions = list(pool.map(one, prompts))
    return Batch(completions, time.monotonic() - start)


def token_logprobs(client: httpx.Client, window: np.ndarray) -> np.ndarray:
    """Natural log-probability of each token of ``window`` after the first, given its prefix.

    Args:
        client: client of the server.
        window: token ids, ``(tokens,)``.

    Returns:
        float64, ``(tokens - 1,)``.

    Raises:
        httpx.HTTPError: the request failed.
    """
    body = {"prompt": window.tolist(), "max_tokens": 0, "echo": True, "logprobs": 0}
    logprobs = _post(client, body)["choices"][0]["logprobs"]["token_logprobs"]
    return np.array(logprobs[1:], dtype=np.float64)


def _post(client: httpx.Client, body: dict[str, Any]) -> dict[str, Any]:
    response = client.post("/v1/completions", json={"model": MODEL_NAME, **body})
    return response.raise_for_status().json()
