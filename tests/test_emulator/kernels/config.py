"""Variants of the NVFP4 GEMM kernel, and products to run on each variant, without CuTe."""

from dataclasses import dataclass

CTA_ROWS = 128  # rows of C that a CTA accumulates: one per lane of tensor memory
TILE_K = 256  # elements of K per stage: 128 bytes, the widest swizzle
MMA_K = 64  # elements of K per MMA, and per 512-byte atom of scales
TILE_BYTES = TILE_K // 2
ATOMS_K = TILE_K // MMA_K
ATOM_BYTES = 512
ATOM_COLUMNS = 4  # columns of tensor memory per atom of scales
TENSOR_COLUMNS = 512
STORE_ROWS = 32  # rows that one epilogue warp stores at a time: the lanes it can reach
STORE_BYTES = 128  # bytes of each row
STORE_SLOTS = 2
STORE_WARPS = 4
SHARED_BYTES = 227 * 1024
BARRIER_BYTES = 1024  # mbarriers, the tensor memory's address, and alignment


@dataclass(frozen=True)
class GemmConfig:
    """One variant of the kernel.

    Attributes:
        tile_n: number of columns of C per tile, 128 or 256.
        two_sm: whether pairs of CTAs accumulate tiles of 256 rows together, each holding half of B.
        stages: depth of the pipeline of operand tiles.
    """

    tile_n: int = 128
    two_sm: bool = False
    stages: int = 3

    def __post_init__(self) -> None:
        if self.tile_n not in (128, 256):
            raise ValueError(f"tile_n: {self.tile_n}, accepted are 128 and 256")
        store = STORE_WARPS * STORE_SLOTS * STORE_ROWS * STORE_BYTES
        deepest = (SHARED_BYTES - BARRIER_BYTES - store) // self.stage_bytes
        if not 2 <= self.stages <= deepest:
            raise ValueError(f"stages: {self.stages}, accepted are 2 to {deepest} for these tiles")

    @property
    def ctas(self) -> int:
        """Number of CTAs that work on one tile."""
        return 2 if self.two_sm else 1

    @property
    def tile_m(self) -> int:
        return CTA_ROWS * self.ctas

    @property
    def b_rows(self) -> int:
        """Number of rows of B in each CTA's shared memory."""
        return self.tile_n // self.ctas

    @property
    def atoms_n(self) -> int:
        """Number of atoms of B's scales along N."""
        return self.tile_n // 128

    @property
    def accumulators(self) -> int:
        """Number of accumulator tiles; with two, the epilogue overlaps the next tile's MMAs."""
        return 2 if 2 * self.tile_n + self._scale_columns <= TENSOR_COLUMNS else 1

    @property
    def _scale_columns(self) -> int:
        return ATOM_COLUMNS * ATOMS_K * (1 + self.atoms_n)

    @property
    def sfa_column(self) -> int:
        """First column of A's scales in tensor memory, after the accumulators."""
        return self.accumulators * self.tile_n

    @property
    def sfb_column(self) -> int:
        return self.sfa_column + ATOM_COLUMNS * ATOMS_K

    @property
    def stage_bytes(self) -> int:
        """Bytes per stage that arrive in one CTA's shared memory."""
        rows = CTA_ROWS + self.b_rows
        return rows * TILE_BYTES + ATOM_BYTES * ATOMS_K * (1 + self.atoms_n)


@dataclass(frozen=True)
class Shape:
    """One product, on one variant of the kernel.

    Attributes:
        m, n, k: sizes of the product.
        config: variant.
        dtype: name of the result's torch dtype.
        sms: number of SMs to use; few, so that each SM gets several tiles.
    """

    m: int
    n: int
    k: int
    config: GemmConfig
    dtype: str = "bfloat16"
    sms: int = 148

    def __post_init__(self) -> None:
        row_bytes = self.n * (4 if self.dtype == "float32" else 2)
        if self.k % 32 or row_bytes % 16:
            raise ValueError(
                f"shape: {self}, K must be a multiple of 32 and rows of C of 16 bytes: "
                "tensor maps have strides of 16 bytes"
            )

    def __str__(self) -> str:
        config = self.config
        variant = f"{config.tile_m}x{config.tile_n}" + ("-2sm" if config.two_sm else "")
        return f"{self.m}x{self.n}x{self.k}-{self.dtype}-{variant}-{self.sms}sms"
