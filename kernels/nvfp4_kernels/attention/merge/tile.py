"""Work of a thread that merges segments. Imports no CuTe."""

from dataclasses import dataclass

from nvfp4_kernels.attention.merge.choose import VECTOR_BYTES

_BYTES = {"float32": 4, "bfloat16": 2, "float16": 2}


@dataclass(frozen=True)
class MergeTile:
    """Work of one thread: 16 bytes of a row, merged over all segments.

    Attributes:
        dtype: dtype of the segments, e.g. ``"float32"``.
        out_dtype: dtype of the result; if quantised, dtype before quantisation.
        head_dim: D.
        sinks: whether heads have sinks.
        prefetch: number of segments whose copies a thread has in flight.
        quantized: whether the result is NVFP4.
    """

    dtype: str
    out_dtype: str
    head_dim: int
    sinks: bool
    prefetch: int
    quantized: bool = False

    @property
    def width(self) -> int:
        """Number of elements that a thread merges."""
        return VECTOR_BYTES // _BYTES[self.dtype]

    @property
    def vectors(self) -> int:
        """Number of 16-byte vectors per row, i.e. of threads."""
        return self.head_dim // self.width

    @property
    def store_bytes(self) -> int:
        """Alignment in bytes of a thread's stores of a 16-bit or float32 result."""
        return min(VECTOR_BYTES, self.width * _BYTES[self.out_dtype])
