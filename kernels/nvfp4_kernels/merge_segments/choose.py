"""How many segments a thread of ``merge_segments`` has on their way. No CuTe in here."""

from nvfp4_kernels.devices import SM_COUNTS

THREADS = 128  # of a CTA
LOAD = 16  # bytes that a thread takes of a segment
MOST_AHEAD = 16
IN_FLIGHT = 64 * 1024  # bytes for an SM: 8 TB/s times a microsecond, and some more


def choose_ahead(segments: int, rows: int, row_bytes: int, sms: int = SM_COUNTS["sm_100"]) -> int:
    """How many segments' bytes a thread has on their way: a power of two up to 16. Pure.

    A decoding batch has few rows, and then only many loads of each thread fill the memory's pipe.

    Args:
        segments: how many there are.
        rows: of a segment.
        row_bytes: of a row.
        sms: of the device.
    """
    ctas = rows * row_bytes // (THREADS * LOAD)
    wanted = IN_FLIGHT / (THREADS * LOAD * max(1, ctas / sms))
    ahead = 1
    while ahead < min(segments, wanted, MOST_AHEAD):
        ahead *= 2
    return ahead
