"""Tensor core time of an instruction."""

from typing import NamedTuple

from tests.emulator.timing.parameters import Parameters

# An MMA step takes 32 bytes of K from each row of A and column of B, for any type.
_STEP_BYTES = 32


class MmaShape(NamedTuple):
    """An MMA, as recorded in events.

    Attributes:
        kind: "f16", "tf32", "f8f6f4", "i8", "mxf8f6f4", "mxf4", "mxf4nvf4".
        m, n, k: elements, of the pair together where ``ctas`` is 2.
        ctas: 1 or 2.
        from_tensor: whether A is in tensor memory.
    """

    kind: str
    m: int
    n: int
    k: int
    ctas: int
    from_tensor: bool

    @property
    def flops(self) -> int:
        return 2 * self.m * self.n * self.k

    @property
    def rows(self) -> int:
        """Number of rows of A in each SM."""
        return self.m // self.ctas


def shared_bytes(shape: MmaShape) -> int:
    """Bytes of operands that each SM reads from its shared memory; a pair halves B."""
    a = 0 if shape.from_tensor else shape.rows * _STEP_BYTES
    return a + shape.n // shape.ctas * _STEP_BYTES


def interval(shape: MmaShape, p: Parameters) -> float:
    """Cycles until the next MMA can begin, limited by arithmetic or by shared-memory operands.

    A pair with M = 128 spreads its 64 rows per SM over the whole tensor core: half the cycles.
    """
    return max(_arithmetic(shape, p), shared_bytes(shape) / p.shared_bandwidth)


def _arithmetic(shape: MmaShape, p: Parameters) -> float:
    cycles = shape.n / p.mma_columns
    return cycles / 2 if shape.ctas == 2 and shape.rows == 64 else cycles


def completion(shape: MmaShape, p: Parameters) -> float:
    """Cycles from an MMA's beginning to its results: arithmetic, loading A, and the pipeline."""
    load = 0.0 if shape.from_tensor else shape.rows * _STEP_BYTES / p.shared_bandwidth
    pair = p.mma_pair_latency if shape.ctas == 2 else 0.0
    return _arithmetic(shape, p) + load + p.mma_latency + pair
