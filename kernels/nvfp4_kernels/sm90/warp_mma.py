"""Warp-level ``mma.sync`` for few tokens: cheaper to issue than ``wgmma`` with descriptors."""

from cutlass import Array, Float32, Int32, Uint32
from cutlass.experimental import primitives as ptx

from nvfp4_kernels.sm90.limits import ROW_BYTES
from nvfp4_kernels.sm90.wgmma import DTYPES


def load_tokens(tokens: Array, first: int, half: int, lane: Int32) -> list[Uint32]:
    """Load the B fragments of 8 tokens and 32 elements of K: two words for each of two K steps.

    ``tokens``: swizzled rows of 128 bytes, 64 elements; ``first``: the first of the 8 rows;
    ``half``: 0 or 1, which half of the 64 elements.
    """
    row = lane % 8
    piece = half * 4 + lane // 8
    at = (first + row) * ROW_BYTES + (piece ^ row) * 16
    address = tokens.subview(at).data_ptr().toint()
    return list(
        ptx.inline_ptx(
            "ldmatrix.sync.aligned.m8n8.x4.shared.b16 {{$w0}, {$w1}, {$w2}, {$w3}}, [{$r0}];",
            write_only_types=[Uint32] * 4,
            read_only_args=[Int32(address)],
        )
    )


def multiply(
    accumulator: list[Float32], a: list[Uint32], b: list[Uint32], dtype: str
) -> list[Float32]:
    """Multiply, D = A · B + D, with M = 16 weight rows, N = 8 tokens, K = 16.

    All operands are this lane's fragments.
    """
    name = DTYPES[dtype]
    return list(
        ptx.inline_ptx(
            f"mma.sync.aligned.m16n8k16.row.col.f32.{name}.{name}.f32 "
            "{{$w0}, {$w1}, {$w2}, {$w3}}, {{$r0}, {$r1}, {$r2}, {$r3}}, {{$r4}, {$r5}}, "
            "{{$r6}, {$r7}, {$r8}, {$r9}};",
            write_only_types=[Float32] * 4,
            read_only_args=[*a, *b, *accumulator],
        )
    )
