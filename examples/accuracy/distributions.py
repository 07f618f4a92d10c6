"""Next-token distributions of a served model on windows of text, and their stored form."""

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import httpx
import numpy as np
import torch
from safetensors.torch import load_file
from torch import Tensor

from examples.accuracy.divergence import divergence, token_logprobs
from examples.accuracy.extension import call
from examples.completions import connect
from examples.completions import token_logprobs as served_logprobs

# The recorded logits and the server's log-probabilities come from the same numbers.
LOGPROB_BOUND = 1e-3


class DistributionError(RuntimeError):
    """Error for missing logits, or logits inconsistent with the server's log-probabilities."""


@dataclass(frozen=True)
class Windows:
    """Figures per window, each a mean over the window's tokens.

    Attributes:
        logprob: natural log-probability of the text's tokens.
        kl: divergence from the reference's distributions, nats per token.
        agreement: share of tokens with the same top-1 token as the reference.
    """

    logprob: list[float]
    kl: list[float]
    agreement: list[float]


def measure_windows(
    url: str,
    windows: np.ndarray,
    reference: Path | None,
    folder: Path,
    on_window: Callable[[], None],
) -> Windows:
    """Measure all windows, with one window in memory at a time.

    Args:
        url: URL of a server with ``Extension``, in development mode.
        windows: token ids, ``(windows, tokens)``.
        reference: folder of the reference's logits; None: this model is the reference.
        folder: folder for logits; only the reference's logits are kept.
        on_window: called after each window.

    Raises:
        DistributionError: the server's logits are missing or inconsistent.
        ValueError: logits are NaN, or of another shape than the reference's.
        httpx.HTTPError: a request fails.
    """
    found = Windows([], [], [])
    with connect(url) as client:
        call(client, "record_logits")
        for number, window in enumerate(windows):
            file = folder / f"logits-{number:04}.safetensors"
            logits = _logits(client, window, file)
            found.logprob.append(float(token_logprobs(logits, torch.tensor(window[1:])).mean()))
            if reference is None:
                found.kl.append(0.0)
                found.agreement.append(1.0)
            else:
                apart = divergence(load_file(reference / file.name)["logits"], logits)
                found.kl.append(float(apart.kl.mean()))
                found.agreement.append(float(apart.agreement.mean()))
                file.unlink()
            on_window()
        call(client, "stop_recording_logits")
    return found


def _logits(client: httpx.Client, window: np.ndarray, file: Path) -> Tensor:
    """Logits at a window's tokens but the last, ``(tokens - 1, vocabulary)``; written to ``file``.

    They are checked against the server's log-probabilities of the window's tokens.
    """
    served = torch.from_numpy(served_logprobs(client, window))
    rows = len(window) - 1
    calls = call(client, "write_logits", str(file), rows)
    if not file.is_file():
        raise DistributionError(
            f"logits: the server's head computed {calls} rows for a window of {len(window)} "
            f"tokens, must be {rows} or {rows + 1} at once; nothing else may use the server, and "
            "--max-num-batched-tokens must hold a window"
        )
    logits = load_file(file)["logits"]
    worst = float((token_logprobs(logits, torch.tensor(window[1:])) - served).abs().max())
    if not worst <= LOGPROB_BOUND:
        raise DistributionError(
            f"logits: differ from the server's log-probabilities of the same tokens by {worst:.3g} "
            f"nats, at most {LOGPROB_BOUND} are rounding; this vLLM computes them otherwise than "
            "LogitsRecorder assumes"
        )
    return logits
