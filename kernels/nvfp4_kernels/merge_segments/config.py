"""Kernels of ``merge_segments``, and the configuration of sm_100's."""

from nvfp4_kernels.dispatch import KernelTable

KERNELS = KernelTable(
    "merge_segments",
    {
        ("cpu", "float"): ("reference", "nvfp4_kernels.merge_segments.reference:merge_segments"),
        ("sm_100", "float"): (
            "MergeSegmentsSm100",
            "nvfp4_kernels.merge_segments.sm100:merge_segments",
        ),
    },
)
THREADS = 128  # of a CTA
LOAD = 16  # bytes that a thread takes of a segment
MOST_AHEAD = 16
SMS = 148  # of a B200
IN_FLIGHT = 64 * 1024  # bytes for an SM: 8 TB/s times a microsecond, and some more


def choose_ahead(segments: int, rows: int, row_bytes: int, sms: int = SMS) -> int:
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
