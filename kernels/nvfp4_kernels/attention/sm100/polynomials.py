"""Polynomials by which the FMA units emulate 2^x. Imports no CuTe."""

from typing import NamedTuple


class Polynomial(NamedTuple):
    """Polynomial in r that approximates 2^r for |r| <= 1/2, exact at 0.

    Attributes:
        coefficients: coefficients of r^0, r^1, ….
        error: bound on the relative error, in float32.
    """

    coefficients: tuple[float, ...]
    error: float


# By degree: the least largest relative error (Lawson's method).
EXP2 = {
    3: Polynomial((1.0, 0.6932829304710766, 0.2422110096944749, 0.055008951242190685), 1.02e-4),
    4: Polynomial(
        (1.0, 0.6931241927484764, 0.24024098607185856, 0.05590643043967086, 0.00958285531), 2.9e-6
    ),
}
