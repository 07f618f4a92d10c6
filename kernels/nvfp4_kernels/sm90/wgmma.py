"""``wgmma`` with A in registers and B in shared memory.

PTX ISA, "Asynchronous Warpgroup Level Matrix Multiply-Accumulate Instructions".
"""

from typing import Any

from cutlass import Array, Float32, Int64, Uint32
from cutlass._mlir import ir
from cutlass._mlir.dialects import llvm
from cutlass.cutlass_dsl import dsl_user_op

DTYPES = {"bfloat16": "bf16", "float16": "f16", "float8_e4m3fn": "e4m3"}
STEP_BYTES = 32  # of K in a row of shared memory per wgmma
_STRIDE = 1024 >> 4  # from 8 rows of 128 bytes to the next 8
_SWIZZLE_128B = 1


def descriptor(rows: Array) -> Int64:
    """Shared-memory descriptor of swizzled 128-byte rows, aligned to 1024 bytes."""
    address = Int64(rows.data_ptr().toint()) >> 4 & 0x3FFF
    return address | (_SWIZZLE_128B << 62 | _STRIDE << 32 | 1 << 16)


@dsl_user_op
def multiply(
    accumulator: list[Float32],
    a: list[Uint32],
    b: Int64,
    dtype: str,
    *,
    loc: Any = None,
    ip: Any = None,
) -> list[Float32]:
    """Multiply, D = A · B + D: M = 64 weight rows, N = ``2 · len(accumulator)`` tokens.

    K is 16 elements of 16 bits or 32 of E4M3. ``accumulator`` and ``a`` are one thread's fragments,
    two or four elements of ``dtype`` in each word of ``a``. Asynchronous: until the wgmma group's
    wait, the result is invalid, and ``a`` must not be overwritten.
    """
    count = len(accumulator)
    outputs = ", ".join(f"${i}" for i in range(count))
    # The tied inputs follow the outputs; A and the descriptor follow them.
    first = 2 * count
    inputs = ", ".join(f"${first + i}" for i in range(4))
    name = DTYPES[dtype]
    depth, transposed = (32, "") if name == "e4m3" else (16, ", 0")
    text = (
        "{ .reg .pred adds; setp.ne.b32 adds, 1, 0; "
        f"wgmma.mma_async.sync.aligned.m64n{2 * count}k{depth}.f32.{name}.{name} "
        f"{{{outputs}}}, {{{inputs}}}, ${first + 4}, adds, 1, 1{transposed}; }}"
    )
    constraints = ["=f"] * count + [str(i) for i in range(count)] + ["r"] * 4 + ["l"]
    results = llvm.inline_asm(
        ir.Type.parse(f"!llvm.struct<({', '.join(['f32'] * count)})>"),
        [
            *(each.ir_value(loc=loc, ip=ip) for each in accumulator),
            *(each.ir_value(loc=loc, ip=ip) for each in a),
            b.ir_value(loc=loc, ip=ip),
        ],
        text,
        ",".join(constraints),
        has_side_effects=True,
        loc=loc,
        ip=ip,
    )
    return _floats(results, count, loc, ip)


@dsl_user_op
def settled(accumulator: list[Float32], *, loc: Any = None, ip: Any = None) -> list[Float32]:
    """Opaque copy of the accumulator, so that the compiler cannot move its reads above the wait."""
    count = len(accumulator)
    constraints = ["=f"] * count + [str(i) for i in range(count)]
    results = llvm.inline_asm(
        ir.Type.parse(f"!llvm.struct<({', '.join(['f32'] * count)})>"),
        [each.ir_value(loc=loc, ip=ip) for each in accumulator],
        "",
        ",".join(constraints),
        has_side_effects=True,
        loc=loc,
        ip=ip,
    )
    return _floats(results, count, loc, ip)


def _floats(struct: Any, count: int, loc: Any, ip: Any) -> list[Float32]:
    f32 = Float32.mlir_type
    return [Float32(llvm.extractvalue(f32, struct, [i], loc=loc, ip=ip)) for i in range(count)]
