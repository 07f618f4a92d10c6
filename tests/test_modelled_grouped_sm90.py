"""Modelled time of both products in a mixture of experts on sm_90, held to a bar."""

import re

import pytest

from tests.test_modelled_terms import modelled

pytestmark = pytest.mark.slow


def test_one_token() -> None:
    """Qwen3-30B: 4.8 µs to read the weights of 8 experts, and the rest for launches and tails."""
    [both] = re.findall(r"both ([\d.]+), least", modelled("grouped_sm90", "--tokens", "1"))
    assert float(both) <= 11.5
