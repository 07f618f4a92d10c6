"""Layout of a CTA's threads over rows, and the choice of a layout for a problem. Imports no CuTe.

A thread takes whole blocks of 16 elements, so that block scales need no exchange between threads.
On Blackwell 32 bytes of a 16-bit type are one load (PTX ISA, "ld", .v8), codes one 8-byte store.

Rows are taken in the order in which the blocked scale layout stores them: slot ``s`` of an atom is
row ``s % 4 * 32 + s // 4``. The scales of one atom that a warp of 8 slots writes are then 32
neighbouring bytes, a whole sector.
"""

from dataclasses import dataclass

from nvfp4_kernels.checks import InvalidArgument

BLOCK = 16
ATOM_ROWS = 128
ATOM_BLOCKS = 4
WARP = 32
WARPS, MAX_WARPS = 8, 16  # of a CTA
LOADED_WORDS = 32  # 32-bit registers a thread loads before it waits
HELD_WORDS, MAX_HELD_WORDS = 36, 51  # registers of row data that a thread keeps between two passes
HELD_BLOCKS = 4  # most blocks per thread where there are many rows


@dataclass(frozen=True)
class RowTile:
    """Rows and blocks that a CTA processes: ``slots`` × ``blocks``.

    Attributes:
        slots: rows per warp, 1, 2, 4 or 8; all warps of the CTA share the same rows.
        warps: warps per CTA, side by side along the rows.
        steps: blocks per thread, all loaded before the first is used.
    """

    slots: int
    warps: int
    steps: int

    @property
    def lanes(self) -> int:
        """Number of threads of a warp that share a row."""
        return WARP // self.slots

    @property
    def stride(self) -> int:
        """Stride of a thread's steps along a row, in blocks."""
        return self.warps * self.lanes

    @property
    def blocks(self) -> int:
        """Number of blocks of a row that one CTA covers."""
        return self.stride * self.steps

    @property
    def threads(self) -> int:
        return self.warps * WARP

    @property
    def groups(self) -> int:
        """Number of groups of ``slots`` rows per atom of scales."""
        return ATOM_ROWS // self.slots


def choose_row_parts(m: int, k: int, words: int, sms: int) -> RowTile:
    """Choose the layout for kernels that process a row's blocks independently. Pure function.

    8 TB/s times a microsecond is 54 KB in flight per SM: 1024 threads with 64 bytes each. With many
    rows a thread loads up to 128 bytes before waiting; with few rows a thread takes one block, and
    CTAs are small, so that a single token is spread over more SMs.

    Args:
        m: number of rows, of all matrices together.
        k: elements per row.
        words: 32-bit words loaded per block.
        sms: number of SMs of the device.
    """
    groups = _ceil_div(m, 8)
    columns = _ceil_div(k, BLOCK)
    for steps in (4, 2):
        tile = RowTile(8, WARPS, steps)
        if steps * words <= LOADED_WORDS and groups * _ceil_div(columns, tile.blocks) >= 2 * sms:
            return tile
    return RowTile(8, WARPS // 2, 1)


def longest_row(words: int) -> int:
    """Number of elements of the longest row that a CTA holds in ``words`` registers per block."""
    return MAX_WARPS * WARP * (MAX_HELD_WORDS // (words + 1)) * BLOCK


def choose_whole_rows(m: int, k: int, words: int, sms: int) -> RowTile:
    """Choose the layout for kernels that reduce a row before writing any part. Pure function.

    Between the two passes a row stays in registers of one CTA. With 8 warps and 36 registers of row
    data per thread, two or three CTAs fit on an SM, so that one loads while another stores. Such a
    CTA takes as many rows as fit, at most 8 (whose scales fill whole sectors), provided that each
    SM still gets two CTAs. Only rows too long for 8 warps get up to 16 warps, with up to 51
    registers per thread. With two rows or more per SM, a thread may hold four blocks, however many
    registers the blocks take: in the tests' time model fewer, larger CTAs take 5 to 15 % less time.

    Args:
        m: number of rows, of all matrices together.
        k: elements per row.
        words: 32-bit registers that a block occupies between the passes.
        sms: number of SMs of the device.

    Raises:
        InvalidArgument: the row is too long for one CTA's registers.
    """
    columns = _ceil_div(k, ATOM_BLOCKS * BLOCK) * ATOM_BLOCKS
    held = words + 1  # and its largest magnitude
    longest = longest_row(words)
    if columns * BLOCK > longest:
        raise InvalidArgument(
            f"x: K is {k}, must be at most {longest}; quantise longer rows with one global scale"
        )
    many = m >= 2 * sms
    usual = WARPS * WARP * (HELD_BLOCKS if many else HELD_WORDS // held)
    slots = 8
    while slots > 1 and (slots * columns > usual or _ceil_div(m, slots) < 2 * sms):
        slots //= 2
    lanes = WARP // slots
    most = WARPS if slots * columns <= usual else MAX_WARPS
    steps = _ceil_div(columns, most * lanes)
    return RowTile(slots, _ceil_div(columns, lanes * steps), steps)


def _ceil_div(a: int, b: int) -> int:
    return -(-a // b)
