"""Run of one seed (draw, perhaps break, call, judge), and of many, with a table of outcomes."""

import signal
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch

import nvfp4_kernels
from nvfp4_kernels import Ids, InvalidArgument, Logits, NoKernelError, Router
from tests import devices
from tests.emulator import EmulatorError, randomised
from tests.fuzz import attention, caches, dispatch, experts, indexer, products, routers, rows
from tests.fuzz.bounds import Wrong, require
from tests.fuzz.describe import described
from tests.fuzz.draw import Draw
from tests.fuzz.ops import Given, Op
from tests.fuzz.wrong import break_one, copied, names_argument, parameters

OPS: dict[str, Op] = {
    **rows.OPS, **products.OPS, **experts.OPS, **attention.OPS, **caches.OPS, **indexer.OPS,
    **routers.OPS, **dispatch.OPS,
}  # fmt: skip
EMULATED = tuple(name for name, op in OPS.items() if op.emulated)
SECONDS = 20.0  # for one seed
EMULATED_SECONDS = 240.0
WRONG_SHARE = 0.4


class TooSlow(BaseException):
    """Error for a seed that exceeds its time limit; no op catches a ``BaseException``."""


@dataclass(frozen=True)
class Verdict:
    """Outcome of a seed.

    Attributes:
        op: name of the op.
        outcome: ``"compared"``; ``"refused"``, naming the broken argument; ``"refused by
            another"``, naming an argument that no longer fits; ``"shapes alone"``, for a tensor on
            the meta device, where torch asks for shapes without calling the op; or ``"finding"``.
        drawn: the arguments, and which of them is broken.
        finding: description of the finding.
    """

    op: str
    outcome: str
    drawn: str = ""
    finding: str = ""


def run_seed(seed: int, ops: Sequence[str] = tuple(OPS), emulated: bool = False) -> Verdict:
    """Run one seed; ``ops`` and the seed choose the op, whose draws depend on the seed only."""
    name = ops[int(np.random.default_rng([seed, 0]).integers(len(ops)))]
    draw = Draw(np.random.default_rng([seed, 1]), emulated)
    given = OPS[name].draw(draw)
    broken = None if emulated or not draw.chance(WRONG_SHARE) else break_one(draw, given)
    drawn = described(given) + (f"; broken: {broken}" if broken else "")
    try:
        # Judges run inside too, with the separate kernels that a fused kernel is compared with.
        limit = EMULATED_SECONDS if emulated else SECONDS
        with _limited(limit), _emulator(seed) if emulated else nullcontext():
            outcome = _judged(name, given, broken, emulated)
    except (Wrong, TooSlow) as error:
        return Verdict(name, "finding", drawn, f"{type(error).__name__}: {error}")
    return Verdict(name, outcome, drawn)


def _judged(name: str, given: Given, broken: str | None, emulated: bool) -> str:
    before, op = copied(given), OPS[name]
    try:
        result = getattr(nvfp4_kernels, name)(**given)
    except EmulatorError:
        raise
    except (InvalidArgument, TypeError, RuntimeError, ValueError, NoKernelError) as error:
        if broken is None:
            return _refused_as_it_has_to_be(error, op, before, emulated)
        return _refused(error, name, broken)
    except Exception as error:
        raise Wrong(f"{type(error).__name__}: {error}") from error
    if _on_no_device(given):  # meta tensors: torch asks for shapes alone, and the op cannot refuse
        return "shapes alone"
    if broken is None and op.refused is not None:
        refused = op.refused(before, emulated)
        require(refused is None, f"{refused}: has to be refused, and was accepted")
    try:
        check = (emulated and op.kernel_check) or op.check
        check(before, result, given)
    except (Wrong, EmulatorError):
        raise
    except Exception as error:
        raise Wrong(
            f"was accepted, and has no meaning to the formula: {type(error).__name__}: {error}"
        ) from error
    return "compared"


def _refused_as_it_has_to_be(error: Exception, op: Op, given: Given, emulated: bool) -> str:
    """Outcome of an error: a documented refusal, as opposed to a refusal of a valid call."""
    if isinstance(error, InvalidArgument | NoKernelError):
        if op.refused is None and emulated:
            return "refused"
        refused = None if op.refused is None else op.refused(given, emulated)
        if refused is not None and str(error).startswith(f"{refused}: "):
            return "refused"
    raise Wrong(f"a valid call was refused: {_said(error)}") from error


def _refused(error: Exception, op: str, broken: str) -> str:
    """Outcome of an error: a refusal that names its reason, as opposed to an accidental error."""
    said = _said(error)
    named = isinstance(error, InvalidArgument | NoKernelError)
    parts = broken.split(" ", 1)[0].split(".")
    if any(names_argument(said, part) for part in parts) and (named or _is_schema(error)):
        return "refused"
    if "can't allocate memory" in said:  # an absurd result size, which only memory limits
        return "refused"
    message = said.split(": ", 1)[1]
    if named and any(message.startswith(name) for name in (*_NAMES, *parameters(op))):
        return "refused by another"
    raise Wrong(said) from error


def _said(error: Exception) -> str:
    return f"{type(error).__name__}: {error}".splitlines()[0]


def _on_no_device(given: Given) -> bool:
    parts = [y for x in given.values() for y in (x if isinstance(x, tuple) else (x,))]
    return any(isinstance(x, torch.Tensor) and x.device.type == "meta" for x in parts)


# Names at the start of messages that are not arguments of every op.
_NAMES = "output", "out_scales", "routing", *Router._fields, *Ids._fields, *Logits._fields


def _is_schema(error: Exception) -> bool:
    """Whether torch, or Python, refused an argument by the op's signature."""
    return isinstance(error, TypeError) or "for argument" in str(error)


@contextmanager
def _emulator(seed: int) -> Iterator[None]:
    try:
        with devices.emulated_ops(randomised(seed)):
            yield
    except EmulatorError as error:
        raise Wrong(f"EmulatorError: {error}") from error


@contextmanager
def _limited(seconds: float) -> Iterator[None]:
    """Context that raises TooSlow after ``seconds``."""

    def stop(*_: object) -> None:
        raise TooSlow(f"took more than {seconds:.0f} s")

    before = signal.signal(signal.SIGALRM, stop)
    signal.setitimer(signal.ITIMER_REAL, seconds)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)


@dataclass
class Table:
    """Counts by op and outcome, and the lines of the findings."""

    counts: Counter[tuple[str, str]] = field(default_factory=Counter)
    findings: list[str] = field(default_factory=list)

    def add(self, seed: int, verdict: Verdict, options: str = "") -> None:
        self.counts[verdict.op, verdict.outcome] += 1
        if verdict.outcome == "finding":
            self.findings.append(
                f"python -m tests.fuzz --first {seed} --seeds 1{options}  # {verdict.op}("
                f"{verdict.drawn}): {verdict.finding}"
            )

    def __str__(self) -> str:
        heads = "compared", "refused", "refused by another", "shapes alone", "finding"
        lines = [f"{'op':34}{'seeds':>7}" + "".join(f"{h:>20}" for h in heads)]
        names = sorted({op for op, _ in self.counts})
        for name in [*names, "all"]:
            found = [sum(n for (op, how), n in self.counts.items() if how == h
                         and name in (op, "all")) for h in heads]  # fmt: skip
            lines.append(f"{name:34}{sum(found):>7}" + "".join(f"{n:>20}" for n in found))
        return "\n".join(lines)


def run_seeds(
    first: int,
    seeds: int,
    minutes: float | None = None,
    ops: Sequence[str] = tuple(OPS),
    emulated: bool = False,
    options: str = "",
    told: Callable[[str], Any] = lambda line: None,
    begins: Callable[[int], Any] = lambda seed: None,
) -> Table:
    """Run seeds in order, within the time limit.

    Args:
        first: first seed.
        seeds: number of seeds.
        minutes: minutes after which no further seed begins; None: no limit.
        ops: ops to choose from.
        emulated: whether sm_100 kernels run, in the emulator.
        options: options of the command that repeats a seed.
        told: called with lines of progress and findings.
        begins: called with each seed before it runs.
    """
    table, begun, heard = Table(), time.monotonic(), time.monotonic()
    torch.set_num_threads(1)
    for seed in range(first, first + seeds):
        if minutes is not None and time.monotonic() - begun > 60 * minutes:
            break
        begins(seed)
        count = len(table.findings)
        table.add(seed, run_seed(seed, ops, emulated), options)
        for line in table.findings[count:]:
            told(line)
        if time.monotonic() - heard > 10:
            heard = time.monotonic()
            done = seed + 1 - first
            told(f"{done} of {seeds} seeds, {len(table.findings)} findings, {heard - begun:.0f} s")
    return table
