"""Divergence of two models' next-token distributions, summed over the whole vocabulary."""

from dataclasses import dataclass

import torch
from torch import Tensor

_ROWS = 64  # rows at a time: 128k float64 values each are 64 MB


@dataclass(frozen=True)
class Divergence:
    """Divergence at each token of a window.

    Attributes:
        kl: Kullback-Leibler divergence, reference ‖ other, nats; float64 ``(tokens,)``.
        agreement: 1 where both models have the same top-1 token, else 0; float64 ``(tokens,)``.
    """

    kl: Tensor
    agreement: Tensor


def divergence(reference: Tensor, other: Tensor) -> Divergence:
    """Compare logits of the same tokens, ``(tokens, vocabulary)`` each.

    Raises:
        ValueError: if the shapes differ, or a value is NaN.
    """
    if reference.shape != other.shape:
        raise ValueError(
            f"other: shape is {tuple(other.shape)}, must be {tuple(reference.shape)}, that of the "
            "reference; compare models of one vocabulary on the same windows"
        )
    kl, agreement = [], []
    for p_logits, q_logits in zip(reference.split(_ROWS), other.split(_ROWS), strict=True):
        log_p, log_q = log_softmax(p_logits), log_softmax(q_logits)
        # A token that the reference excludes costs nothing, for any probability in the other.
        cost = torch.where(log_p == -torch.inf, 0.0, log_p.exp() * (log_p - log_q))
        kl.append(cost.sum(-1))
        agreement.append((p_logits.argmax(-1) == q_logits.argmax(-1)).double())
    return Divergence(torch.cat(kl), torch.cat(agreement))


def token_logprobs(logits: Tensor, tokens: Tensor) -> Tensor:
    """Log-probabilities of ``tokens`` ``(tokens,)``: float64, from logits ``(tokens, vocabulary)``.

    Raises:
        ValueError: if a logit is NaN.
    """
    chosen = zip(logits.split(_ROWS), tokens.split(_ROWS), strict=True)
    return torch.cat([log_softmax(rows).gather(-1, ids[:, None])[:, 0] for rows, ids in chosen])


def log_softmax(logits: Tensor) -> Tensor:
    """Log-softmax in float64.

    Raises:
        ValueError: if a logit is NaN.
    """
    if bool(logits.isnan().any()):
        raise ValueError("logits: hold NaN, must be numbers; the model is broken, or its server is")
    return logits.double().log_softmax(-1)
