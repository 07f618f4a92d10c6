"""Time of a whole problem, extrapolated from small runs of a few steps; the speed of light."""

from dataclasses import dataclass, replace

from tests.emulator.timing.parameters import B200_TIMING, Parameters
from tests.emulator.timing.result import Timing

# FLOP per clock and SM of dense MMAs (datasheet; parameters.py, mma_columns).
_RATES = {"f16": 8192, "tf32": 4096, "f8f6f4": 16384, "i8": 16384}
_RATES |= {"mxf8f6f4": 16384, "mxf4": 32768, "mxf4nvf4": 32768}


@dataclass(frozen=True)
class SpeedOfLight:
    """Lower bound on the time of a problem (speed of light).

    Attributes:
        tensor_us: µs that the tensor cores need for the arithmetic.
        hbm_us: µs that HBM needs for the bytes read and written.
    """

    tensor_us: float
    hbm_us: float

    @property
    def microseconds(self) -> float:
        return max(self.tensor_us, self.hbm_us)

    @property
    def limit(self) -> str:
        return "tensor core" if self.tensor_us >= self.hbm_us else "HBM"


def speed_of_light(
    flops: float,
    read: float,
    written: float = 0.0,
    kind: str = "mxf4nvf4",
    parameters: Parameters = B200_TIMING,
) -> SpeedOfLight:
    """Lower bound on the time of a problem on the chip, for any kernel.

    Args:
        flops: operations, two for each multiply-add.
        read: bytes from HBM, each counted once.
        written: bytes to HBM.
        kind: kind of the MMA, as in ``tcgen05.mma.kind::``.
        parameters: parameters of the chip.

    Raises:
        ValueError: an unknown kind.
    """
    if kind not in _RATES:
        raise ValueError(f"kind: {kind!r}, accepted {', '.join(_RATES)}")
    p = parameters
    peak = _RATES[kind] * p.sms * p.clock * 1e3  # FLOP/us
    nbytes = read + written * p.hbm_write_cost
    return SpeedOfLight(flops / peak, nbytes / (p.hbm_bandwidth * 1e6))


def extrapolate(few: Timing, many: Timing, steps: tuple[float, float, float]) -> Timing:
    """Time of a problem, extrapolated from two modelled launches with fewer steps.

    Args:
        few: launch with steps[0] of the repeated work, such as tiles of K or of a persistent CTA;
            more steps than the kernel's pipelines are deep.
        many: launch of the same grid with steps[1].
        steps: steps in ``few``, in ``many``, and in the problem.

    Raises:
        ValueError: steps that do not grow, or grids that differ.
    """
    first, second, wanted = steps
    if not 0 < first < second <= wanted:
        raise ValueError(f"steps: {steps}, accepted numbers from 1 of which each is larger")
    if few.clusters != many.clusters:
        raise ValueError(
            f"many: {many.clusters} clusters, accepted {few.clusters} as in few; pass clusters="
        )
    more = (wanted - second) / (second - first)

    def onwards(one: float, two: float) -> float:
        return two + more * (two - one)

    cycles = onwards(few.cycles, many.cycles)
    units = few.busy.keys() | many.busy.keys()
    busy = {
        unit: onwards(few.busy.get(unit, 0.0) * few.cycles, many.busy.get(unit, 0.0) * many.cycles)
        / cycles
        for unit in units
    }
    return replace(
        many,
        cycles=cycles,
        exact=False,
        busy=busy,
        flops=onwards(few.flops, many.flops),
        read_bytes=onwards(few.read_bytes, many.read_bytes),
        hbm_bytes=onwards(few.hbm_bytes, many.hbm_bytes),
        notes=[*many.notes, f"extrapolated from {first:g} and {second:g} steps to {wanted:g}"],
    )
