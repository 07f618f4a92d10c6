"""Thread layout of ``rotary_store``, and compile-time variants of its kernel. Imports no CuTe."""

from dataclasses import dataclass

PIECE = 8  # elements that a thread loads at once: 16 bytes
PART = 2 * PIECE  # elements of a head that a thread has
WARP = 32


@dataclass(frozen=True)
class HeadTile:
    """Layout of threads over a head.

    A thread has 16 elements of a head, in two pieces. A head has a power of two neighbouring lanes,
    some of which may be idle.

    Attributes:
        head_dim: D.
        rotary_dim: R.
    """

    head_dim: int
    rotary_dim: int

    @property
    def parts(self) -> int:
        """Number of threads per head that have work."""
        return self.head_dim // PART

    @property
    def rotary_parts(self) -> int:
        """Number of threads per head that rotate."""
        return self.rotary_dim // PART

    @property
    def lanes(self) -> int:
        """Number of threads per head: the least power of two that suffices."""
        return 1 << (self.parts - 1).bit_length()


@dataclass(frozen=True, kw_only=True)
class RotaryStoreTile(HeadTile):
    """Layout of a CTA's threads over heads.

    A CTA has either query heads, or keys with their values: a thread that has elements of a key
    also has the elements of the value with the same indices.

    Attributes:
        query_heads: Hq.
        kv_heads: Hkv.
        threads: threads of a CTA, whole warps.
        steps: query heads per thread.
    """

    query_heads: int
    kv_heads: int
    threads: int
    steps: int

    @property
    def units(self) -> int:
        """Number of units per CTA: KV heads, or groups of query heads."""
        return self.threads // self.lanes

    @property
    def query_units(self) -> int:
        """Number of groups of ``steps`` query heads per token; the last may be partial."""
        return -(-self.query_heads // self.steps)


@dataclass(frozen=True)
class Variant:
    """Data types and options of the kernel, fixed at compile time.

    Attributes:
        dtype: dtype of queries, keys and values.
        table_dtype: dtype of cosines and sines.
        position_dtype: ``"int64"`` or ``"int32"``.
        page_size: tokens per page of the cache.
        neox: whether the elements of a pair are R/2 apart, instead of neighbours.
        fp8: whether the cache is E4M3; otherwise the cache has ``dtype``.
        q_norm, k_norm: whether queries and keys, respectively, are normalised.
        norm_dtype: dtype of the norms' weights.
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
        """Whether queries or keys are normalised."""
        return self.q_norm or self.k_norm
