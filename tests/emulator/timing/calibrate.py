"""Comparison of the model with measurements: published on B200s, and the project's on an H200."""

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

from rich.table import Table

from tests.emulator.examples.run import preloaded
from tests.emulator.timing.example import MARK
from tests.emulator.timing.microbenchmarks import copy_loop, stream
from tests.emulator.timing.model import model
from tests.emulator.timing.parameters import B200_TIMING, H200_TIMING, Parameters
from tests.emulator.timing.published import (
    COPIES,
    COPIES_CLOCK,
    KERNELS,
    MMAS,
    STREAMS,
    Kernel,
    MeasuredCopies,
    MeasuredStream,
)
from tests.emulator.timing.tensor_core import MmaShape, completion, interval

_FAR = 2.0  # error factor from which a table flags the model as off


def verdict(modelled: float, measured: float) -> str:
    """The model's error, described in words if large."""
    error = modelled / measured - 1
    far = max(modelled / measured, measured / modelled) >= _FAR
    return f"{error:+.0%}" + (" OFF BY MORE THAN 2x" if far else "")


def multiplies(p: Parameters = B200_TIMING) -> Table:
    """Table of MMA intervals and latencies."""
    table = Table(title="one MMA, cycles: SemiAnalysis' measurements and the model")
    for column in ("MMA", "interval", "model", "error", "latency", "model", "error"):
        table.add_column(column, justify="left" if column == "MMA" else "right")
    for row in MMAS:
        shape = MmaShape(row.kind, row.m, row.n, row.k, row.ctas, row.from_tensor)
        every = interval(shape, p)
        until = completion(shape, p) + p.wake_latency
        where = "TS" if row.from_tensor else "SS"
        table.add_row(
            f"{row.kind} {where} {row.m}x{row.n}x{row.k} cta_group::{row.ctas}",
            f"{row.interval:.0f}",
            f"{every:.0f}",
            verdict(every, row.interval),
            f"{row.latency:.0f}",
            f"{until:.0f}",
            verdict(until, row.latency),
        )
    return table


def copy_cycles(row: MeasuredCopies, p: Parameters) -> float:
    """Modelled cycles per copy of each SM, in the loop of the published measurement."""
    few, many = (
        model(
            copy_loop(row.nbytes, row.stages, count).run(), p, clusters=int(p.sms), footprint=1e15
        ).cycles
        for count in (16, 48)
    )
    return (many - few) / 32


def copies(p: Parameters = B200_TIMING) -> Table:
    """Table of TMA loads from HBM."""
    table = Table(title="TMA loads from HBM by all SMs, cycles each: SemiAnalysis and the model")
    for column in ("bytes", "under way", "measured", "model", "error"):
        table.add_column(column, justify="right")
    measured_at = replace(p, clock=COPIES_CLOCK)
    for row in COPIES:
        cycles = copy_cycles(row, measured_at)
        table.add_row(
            str(row.nbytes),
            str(row.stages),
            f"{row.cycles:.0f}",
            f"{cycles:.0f}",
            verdict(cycles, row.cycles),
        )
    return table


def stream_rate(row: MeasuredStream, p: Parameters) -> float:
    """Modelled GB/s of a loop that was measured on an H200."""
    few, many = (
        model(
            stream(row.threads, row.loads, count, hint=".L1::no_allocate").run(),
            p,
            clusters=int(p.sms),
            footprint=1e15,
        )
        for count in (8, 32)
    )
    nbytes = 24 * 16 * row.threads * row.loads * p.sms
    return nbytes / p.microseconds(many.cycles - few.cycles) / 1e3


def streams(p: Parameters = H200_TIMING) -> Table:
    """Table of 16-byte loads from HBM, by few and by many threads."""
    table = Table(title="loads from HBM by all SMs of an H200, GB/s: measured and the model")
    for column in ("threads an SM", "loads under way", "measured", "model", "error"):
        table.add_column(column, justify="right")
    for row in STREAMS:
        rate = stream_rate(row, p)
        table.add_row(
            str(row.threads),
            str(row.loads),
            f"{row.rate:.0f}",
            f"{rate:.0f}",
            verdict(rate, row.rate),
        )
    return table


def run_example(
    script: Path,
    arguments: str,
    sms: int,
    clusters: int = 0,
    footprint: float = -1,
    only: str = "",
    timeline: str = "",
) -> Iterator[str]:
    """Output lines of an example with timed launches, run in a separate process.

    For the arguments see ``tests.emulator.timing.example``.

    Raises:
        RuntimeError: the example failed.
    """
    command = [sys.executable, "-m", "tests.emulator.timing.example", str(script), arguments]
    command += [str(sms), str(clusters), str(footprint), only, timeline]
    with preloaded() as library:
        environment = {**os.environ, "LD_PRELOAD": library, "OMP_NUM_THREADS": "1"}
        done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    if done.returncode:
        raise RuntimeError(f"{script.name}: ended with {done.returncode}\n{done.stderr[-2000:]}")
    yield from done.stdout.splitlines()


def kernel_cycles(kernel: Kernel, cutlass: Path, p: Parameters) -> tuple[float, float]:
    """Cycles of the whole problem, and the fraction in which the MMA pipes work."""
    found: list[dict[str, float]] = []
    for size in kernel.sizes:
        lines = run_example(
            cutlass / "examples/python/CuTeDSL" / kernel.script,
            kernel.arguments.format(steps=size),
            kernel.sms or int(p.sms),
            kernel.clusters,
            kernel.footprint * (len(found) + 1),
        )
        results = [json.loads(s.removeprefix(MARK)) for s in lines if s.startswith(MARK)]
        found.append(max(results, key=lambda result: float(result["flops"])))
    one, two = found[0], found[-1]
    if one is two:
        return one["cycles"], one["tensor"]
    step = two["cycles"] - one["cycles"]
    cycles = kernel.waves * (one["cycles"] + (kernel.steps - 1) * step + p.cta_launch)
    peak = (two["flops"] - one["flops"]) / (
        two["tensor"] * two["cycles"] - one["tensor"] * one["cycles"]
    )
    return cycles, kernel.flops / (peak * cycles)


def kernels(cutlass: Path, p: Parameters = B200_TIMING) -> Table:
    """Table of whole kernels against published throughput."""
    table = Table(title="NVIDIA's examples and what others measured for the same problems")
    for column in ("problem", "pipes busy", "TFLOP/s", "at sustained clock", "published", "error"):
        table.add_column(column)
    for kernel in KERNELS:
        cycles, busy = kernel_cycles(kernel, cutlass, p)
        overhead = p.launch_overhead if kernel.launched else 0.0
        nominal = kernel.flops / (p.microseconds(cycles) + overhead) / 1e6
        slow = p.microseconds(cycles) * p.clock / p.sustained_clock + overhead
        sustained = kernel.flops / slow / 1e6
        for value, source in kernel.published:
            table.add_row(
                kernel.name,
                f"{busy:.1%}",
                f"{nominal:.0f}",
                f"{sustained:.0f}",
                f"{value:.0f}: {source}",
                f"{verdict(nominal, value)}; sustained {verdict(sustained, value)}",
            )
    return table
