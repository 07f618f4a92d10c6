"""Modelled times of a mixture of experts in decode, held to bars."""

import re

import pytest

from tests.test_modelled_terms import modelled

pytestmark = pytest.mark.slow


@pytest.mark.parametrize(("tokens", "products", "layer"), [(1, 9.0, 12.0), (8, 30.0, 33.0)])
def test_decode_of_an_eighth_of_deepseek(tokens: int, products: float, layer: float) -> None:
    """Rank with 32 of 256 experts: 1 or 8 tokens hit 1 or 7 experts, 3.1 or 21.7 µs of weights."""
    output = modelled(
        "experts", "--only-chain", "--model", "deepseek-v3-ep8", "--tokens", str(tokens)
    )
    [us] = re.findall(r"in a chain ([\d.]+)", output)
    assert float(us) <= products
    [us] = re.findall(r"layer ([\d.]+)", output)
    assert float(us) <= layer
