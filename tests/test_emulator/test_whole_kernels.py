"""A whole kernel of our own, as CuTe DSL compiles it, against the float reference: bit for bit."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.emulator import STANDARD, Schedule
from tests.test_emulator.kernels.cases import SHAPES, SPEED

pytest.importorskip("cutlass")
ROOT = Path(__file__).parents[2]

Outcomes = dict[tuple[str, str], list[tuple[str, float]]]


def label(shape: tuple[object, ...]) -> str:
    m, n, k, config, dtype, sms = shape
    tile = f"{config.tile_m}x{config.tile_n}" + ("-2sm" if config.two_sm else "")
    return f"{m}x{n}x{k}-{dtype}-{tile}-{sms}sms"


@pytest.fixture(scope="module")
def outcomes() -> Outcomes:
    """What a process with the emulator's runtime says of each shape in each schedule."""
    done = subprocess.run(
        [sys.executable, "-m", "tests.test_emulator.kernels.cases"],
        cwd=ROOT,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    found: Outcomes = {}
    for line in done.stdout.splitlines():
        shape, schedule, result, seconds = json.loads(line)
        found.setdefault((shape, schedule), []).append((result, seconds))
    return found


@pytest.mark.parametrize("schedule", STANDARD, ids=str)
@pytest.mark.parametrize("shape", SHAPES, ids=label)
def test_every_bit_in_every_schedule(
    shape: tuple[object, ...], schedule: Schedule, outcomes: Outcomes
) -> None:
    for result, _ in outcomes[label(shape), schedule.name]:
        assert result == "right"


def test_a_tile_is_fast_once_compiled(outcomes: Outcomes) -> None:
    seconds = min(seconds for _, seconds in outcomes[label(SPEED), "eager"])
    print(f"{label(SPEED)}: {seconds:.3f} s")
    assert seconds < 0.5
