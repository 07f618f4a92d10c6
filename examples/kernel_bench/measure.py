"""Timing of every contender at every layer and number of tokens, on this machine's GPU."""

import math
import statistics
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial

import torch
from torch import Tensor

from examples.kernel_bench.contenders import Contender, Operands
from examples.kernel_bench.layers import BenchLayer
from examples.kernel_bench.machine import l2_bytes
from examples.kernel_bench.operands import (
    checked_rows,
    expected_rows,
    largest_relative_error,
    random_tokens,
    random_weights,
)
from examples.kernel_bench.results import Results, Sample
from nvfp4_kernels.formats.nvfp4 import Nvfp4Tensor
from nvfp4_kernels.tool.timed_graphs import LaunchGraph, captured, timed

REPLAY_SECONDS = 2e-3  # long enough that the two events around a replay do not count
MOST_LAUNCHES = 256
WARM_UP_ROUNDS = 3


@dataclass(frozen=True)
class Prepared:
    """Contender with a layer's weights, in enough copies to exceed L2."""

    contender: Contender
    copies: list[Operands]


def copies_beyond(l2_size: int, nbytes: float) -> int:
    """Number of copies of an ``nbytes`` weight; twice L2 is read between two uses of a copy."""
    return 1 + math.ceil(2 * l2_size / nbytes)


def launches_of(seconds: float) -> int:
    """Number of launches in a replay of ``REPLAY_SECONDS``, if a launch takes ``seconds``."""
    return max(1, min(MOST_LAUNCHES, math.ceil(REPLAY_SECONDS / seconds)))


def measure(
    results: Results,
    tokens: Sequence[int],
    contenders: Mapping[str, Contender],
    device: torch.device,
    rounds: int,
    on_case: Callable[[list[Sample]], None],
) -> None:
    """Add the samples of every layer to ``results``.

    Args:
        results: results with layers and rates.
        tokens: numbers of tokens.
        contenders: contenders by name.
        device: a CUDA device.
        rounds: replays of each contender, which alternate.
        on_case: called with the samples of each layer and number of tokens.
    """
    for layer in results.layers:
        weights = random_weights(layer, device)
        prepared, refused = prepare(layer, weights, contenders, l2_bytes(device))
        for m in tokens:
            x = random_tokens(m, layer.k, device)
            errors, failed = check(layer, x, weights, prepared)
            ready = {name: prepared[name] for name in errors}
            graphs, not_captured = capture(results, layer, x, ready)
            timed(graphs, WARM_UP_ROUNDS)
            times = timed(graphs, rounds)
            why = refused | failed | not_captured
            samples = [
                _sample(layer, m, name, ready[name], graphs[name].launches, times[name])
                if name in graphs
                else Sample(layer.name, m, name, refused=why[name])
                for name in contenders
            ]
            samples = [replace(s, error=errors.get(s.contender, 0.0)) for s in samples]
            results.samples += samples
            on_case(samples)


def prepare(
    layer: BenchLayer,
    weights: tuple[Nvfp4Tensor, ...],
    contenders: Mapping[str, Contender],
    l2_size: int,
) -> tuple[dict[str, Prepared], dict[str, str]]:
    """Copies of the weights for each contender, and the reason of each failed preparation."""
    prepared, refused = {}, {}
    for name, contender in contenders.items():
        try:
            first = contender.operands(layer, weights)
        except Exception as error:
            refused[name] = reason(error)
            continue
        count = copies_beyond(l2_size, layer.elements * contender.weight_bytes)
        rest = [tuple(part.clone() for part in first) for _ in range(count - 1)]
        prepared[name] = Prepared(contender, [first, *rest])
    return prepared, refused


def check(
    layer: BenchLayer,
    x: Tensor,
    weights: tuple[Nvfp4Tensor, ...],
    prepared: Mapping[str, Prepared],
) -> tuple[dict[str, float], dict[str, str]]:
    """Largest relative error of each contender on a few rows; reason of each failed launch."""
    rows = checked_rows(x.shape[0])
    errors, refused = {}, {}
    for name, ready in prepared.items():
        contender = ready.contender
        try:
            got = contender.launch(layer, x, ready.copies[0])[rows]
        except Exception as error:
            refused[name] = reason(error)
            continue
        expected = expected_rows(layer, contender.seen(x[rows]), contender.held(weights))
        errors[name] = largest_relative_error(got, expected)
    return errors, refused


def capture(
    results: Results, layer: BenchLayer, x: Tensor, prepared: Mapping[str, Prepared]
) -> tuple[dict[str, LaunchGraph], dict[str, str]]:
    """CUDA graph of each contender, and the reason of each failed capture."""
    m = x.shape[0]
    graphs, refused = {}, {}
    for name, ready in prepared.items():
        moved = layer.nbytes(m, ready.contender.weight_bytes) / results.read_bytes_per_second
        seconds = max(moved, layer.flops(m) / results.bf16_flops_per_second)
        steps = [partial(ready.contender.launch, layer, x, copy) for copy in ready.copies]
        try:
            graphs[name] = captured(steps, launches_of(seconds))
        except Exception as error:
            refused[name] = reason(error)
    return graphs, refused


def reason(error: Exception) -> str:
    """An error as one line."""
    return f"{type(error).__name__}: {(str(error).splitlines() or [''])[0]}"


def _sample(
    layer: BenchLayer,
    m: int,
    name: str,
    ready: Prepared,
    launches: int,
    taken: list[float],
) -> Sample:
    return Sample(
        layer=layer.name,
        m=m,
        contender=name,
        median_us=statistics.median(taken),
        least_us=min(taken),
        most_us=max(taken),
        launches=launches,
        copies=len(ready.copies),
        nbytes=layer.nbytes(m, ready.contender.weight_bytes),
        flops=layer.flops(m),
    )
