"""Thread layout of ``rotary_store``, and what one kernel is compiled for. No CuTe."""

from dataclasses import dataclass

PIECE = 8  # elements that a thread loads at once: 16 bytes
PART = 2 * PIECE  # elements of a head that a thread has
WARP = 32


@dataclass(frozen=True)
class HeadTile:
    """Threads of a head.

    A thread has 16 elements of a head, in two pieces; threads of a head are neighbours in a warp, a
    power of two of them, and some may stand idle.

    Attributes:
        head_dim: D.
        rotary_dim: R.
    """

    head_dim: int
    rotary_dim: int

    @property
    def parts(self) -> int:
        """Threads of a head that have work."""
        return self.head_dim // PART

    @property
    def rotary_parts(self) -> int:
        """Threads of a head that rotate."""
        return self.rotary_dim // PART

    @property
    def lanes(self) -> int:
        """Threads of a head: the least power of two that is enough."""
        return 1 << (self.parts - 1).bit_length()


@dataclass(frozen=True, kw_only=True)
class RotaryStoreTile(HeadTile):
    """Threads of a CTA over heads.

    A CTA has heads of queries, or of keys with their values: a thread of a key has the value's
    elements too.

    Attributes:
        query_heads: Hq.
        kv_heads: Hkv.
        threads: of a CTA, whole warps.
        steps: heads of queries that a thread has.
    """

    query_heads: int
    kv_heads: int
    threads: int
    steps: int

    @property
    def units(self) -> int:
        """Heads of keys, or groups of heads of queries, that a CTA has."""
        return self.threads // self.lanes

    @property
    def query_units(self) -> int:
        """Groups of ``steps`` query heads of a token; the last may lack some."""
        return -(-self.query_heads // self.steps)


@dataclass(frozen=True)
class Variant:
    """Data types and steps that a kernel is compiled for.

    Attributes:
        dtype: of queries, keys and values.
        table_dtype: of cosines and sines.
        position_dtype: ``"int64"`` or ``"int32"``.
        page_size: tokens of a page.
        neox: whether a pair lies R/2 apart.
        fp8: whether the cache is E4M3; else it has ``dtype``.
        q_norm, k_norm: whether they are normalised.
        norm_dtype: of the norms' weights.
    """

    dtype: str
    table_dtype: str
    position_dtype: str
    page_size: int
    neox: bool
    fp8: bool
    q_norm: bool
    k_norm: bool
    norm_dtype: str

    @property
    def norms(self) -> bool:
        """Whether any is normalised."""
        return self.q_norm or self.k_norm
