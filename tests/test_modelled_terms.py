"""Modelled times for activations that are sums of NVFP4 terms, held to bars."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from tests import devices

pytestmark = pytest.mark.slow

ROOT = Path(__file__).parents[1]


def modelled(command: str, *arguments: str) -> str:
    """Output of a command of ``tests.modelled``, run in a process of its own."""
    devices.cutlass_or_skip()
    done = subprocess.run(
        [sys.executable, "-m", f"tests.modelled.{command}", *arguments],
        cwd=ROOT,
        env=os.environ | {"OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_three_terms_cost_a_decode_layer_little() -> None:
    """Products of Llama 8B in a chain: the weights are read once for any number of terms."""
    one, three = (
        [float(us) for us in re.findall(r"in a chain ([\d.]+)", output)]
        for output in (
            modelled("layer", "--only-chain", "--terms", terms, "--tokens", "1", "8", "16")
            for terms in ("1", "3")
        )
    )
    assert len(one) == len(three) == 3
    assert all(b <= 1.1 * a for a, b in zip(one, three, strict=True)), (one, three)


LARGE = {
    "1,19968,6656": 14.0,
    "1,6656,19968": 14.0,
    "32,19968,6656": 15.0,
    "32,6656,19968": 15.0,
}


@pytest.fixture(scope="module")
def large() -> dict[str, float]:
    """Modelled microseconds of the large products, by shape."""
    output = modelled("gemm", "--terms", "3", "--shape", *LARGE)
    found = re.findall(r"^(\S+) +([\d.]+) us, least", output, re.MULTILINE)
    return {shape: float(us) for shape, us in found}


@pytest.mark.parametrize("shape", LARGE)
def test_large_products_of_few_tokens(shape: str, large: dict[str, float]) -> None:
    assert large[shape] <= LARGE[shape]


def test_a_tile_of_some_of_the_tokens() -> None:
    """The scales of 32 of 64 tokens: the terms do not share an atom, though 32 rows could."""
    output = modelled("gemm", "--terms", "3", "--shape", "64,2048,2048")
    assert "Tile(columns=32," in output
    assert "TermLayout(count=3, packed=False)" in output


@pytest.mark.parametrize("terms", [2, 3])
def test_many_tokens(terms: int) -> None:
    """The product reaches at least three quarters of 9 PFLOP/s, divided by the number of terms."""
    output = modelled("gemm", "--terms", str(terms), "--shape", "8192,8192,8192")
    [us] = re.findall(r"([\d.]+) us, least", output)
    assert 2.0 * 8192**3 / float(us) / 1e9 >= 0.75 * 9.0 / terms
