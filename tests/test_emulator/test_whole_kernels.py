"""A whole kernel of our own, as CuTe DSL compiles it, against the float reference: bit for bit."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.emulator import STANDARD, Schedule
from tests.test_emulator.kernels.cases import SHAPES
from tests.test_emulator.kernels.config import GemmConfig, Shape

ROOT = Path(__file__).parents[2]

Outcomes = dict[tuple[str, str], tuple[str, float]]


@pytest.fixture(scope="module")
def outcomes() -> Outcomes:
    """What a process with the emulator's runtime says of each shape in each schedule."""
    pytest.importorskip("cutlass")
    done = subprocess.run(
        [sys.executable, "-m", "tests.test_emulator.kernels.cases"],
        cwd=ROOT,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    found = {}
    for line in done.stdout.splitlines():
        shape, schedule, result, seconds = json.loads(line)
        found[shape, schedule] = result, seconds
    return found


@pytest.mark.parametrize("schedule", STANDARD, ids=str)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_every_bit_in_every_schedule(shape: Shape, schedule: Schedule, outcomes: Outcomes) -> None:
    result, _ = outcomes[str(shape), schedule.name]
    assert result == "right"


def test_a_tile_is_fast_once_compiled(outcomes: Outcomes) -> None:
    shape = next(s for s in SHAPES if (s.m, s.n, s.k) == (128, 256, 256))
    seconds = min(outcomes[str(shape), schedule.name][1] for schedule in STANDARD)
    print(f"{shape}: {seconds:.3f} s of one core")
    assert seconds < 0.5


def test_what_the_kernel_cannot_do_is_refused() -> None:
    with pytest.raises(ValueError, match="tile_n: 192, accepted are 128 and 256"):
        GemmConfig(tile_n=192)
    with pytest.raises(ValueError, match="stages: 9, accepted are 2 to 5 for these tiles"):
        GemmConfig(stages=9)
    with pytest.raises(ValueError, match="K must be a multiple of 32"):
        Shape(128, 128, 48, GemmConfig())
    with pytest.raises(ValueError, match="rows of C of 16 bytes"):
        Shape(128, 130, 64, GemmConfig())
