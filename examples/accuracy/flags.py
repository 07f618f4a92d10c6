"""Variants that are further from the reference than their format can explain.

Weights: rounding to NVFP4 changes a weight matrix by 8 to 10 %, in random directions. A matrix that
is more than 20 % off, or 3 % larger or smaller as a whole, has wrong scales.

Served: the cost of rounding is measured in the same run, with yardsticks independent of our files
and our kernels: the 16-bit model with its weights rounded to NVFP4 and back, and the same model
with its activations rounded too. A variant may diverge 3 times as far as the yardstick with the
same tensors rounded, which leaves room for calibrated scales and an FP8 KV cache; a variant that
rounds nothing may diverge no further than the yardstick with rounded weights, and a variant with
FP8 activations, whose loss is a fraction of the weights', twice as far. A variant whose whole
95 % interval lies above the limit computes wrongly.
"""

from collections.abc import Mapping, Sequence
from statistics import median

from examples.accuracy.variants import ROUNDED_BOTH, ROUNDED_WEIGHTS, Rounds
from examples.accuracy.weight_error import WeightError
from examples.perplexity import Interval

RELATIVE_ERROR = 0.20
GAIN = 0.03
# Rounded tensors of a variant -> its yardstick, and the allowed multiple of its divergence.
ALLOWANCE: dict[Rounds, tuple[str, float]] = {
    "nothing": (ROUNDED_WEIGHTS, 1.0),
    "weights": (ROUNDED_WEIGHTS, 3.0),
    "weights and activations": (ROUNDED_BOTH, 3.0),
    "weights, activations to FP8": (ROUNDED_WEIGHTS, 2.0),
}


def weight_flags(errors: Sequence[WeightError]) -> list[str]:
    """Reason why weights are wrong, a list of one line; an empty list if all are right."""
    wrong = [e for e in errors if e.relative > RELATIVE_ERROR or abs(e.gain - 1) > GAIN]
    if not wrong:
        return []
    worst = max(wrong, key=lambda e: e.relative)
    return [
        f"{len(wrong)} of {len(errors)} weights have wrong scales: {worst.layer} is "
        f"{worst.relative:.0%} off the 16-bit weight and {worst.gain:.2f} times as large, the "
        f"median is {median(e.relative for e in errors):.0%} off; NVFP4 rounds by 8 to 10%"
    ]


def served_flags(kl: Interval, rounds: Rounds, yardsticks: Mapping[str, Interval]) -> list[str]:
    """Reason why the served distributions are wrong, a list of one line; empty if they are right.

    Args:
        kl: divergence from the reference.
        rounds: tensors that the variant rounds.
        yardsticks: divergences of the yardsticks, by name.
    """
    name, allowance = ALLOWANCE[rounds]
    explained = yardsticks[name].estimate
    if kl.low <= allowance * explained:
        return []
    ratio = kl.estimate / explained if explained else float("inf")
    return [
        f"its divergence is {ratio:.3g} times that of {name} ({explained:.3g} nats), what rounds "
        f"{rounds} may have {allowance:g} times that"
    ]
