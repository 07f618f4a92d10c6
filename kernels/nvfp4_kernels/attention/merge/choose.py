"""Choice of the prefetch distance of ``merge_segments``. Imports no CuTe."""

from nvfp4_kernels.devices import SM_COUNTS

THREADS = 128  # per CTA
VECTOR_BYTES = 16  # of a segment that a thread merges
MAX_PREFETCH = 16  # segments
BYTES_IN_FLIGHT = 64 * 1024  # per SM: 8 TB/s times a microsecond, and some more


def choose_prefetch(
    segments: int, rows: int, row_bytes: int, sms: int = SM_COUNTS["sm_100"]
) -> int:
    """Choose the number of segments whose copies a thread has in flight. Pure function.

    A decoding batch has few rows, so that only many copies per thread saturate memory bandwidth.

    Args:
        segments: number of segments.
        rows: number of rows per segment.
        row_bytes: bytes of a segment's row.
        sms: number of SMs of the device.

    Returns:
        A power of two up to ``MAX_PREFETCH``.
    """
    ctas = rows * row_bytes // (THREADS * VECTOR_BYTES)
    wanted = BYTES_IN_FLIGHT / (THREADS * VECTOR_BYTES * max(1, ctas / sms))
    prefetch = 1
    while prefetch < min(segments, wanted, MAX_PREFETCH):
        prefetch *= 2
    return prefetch
