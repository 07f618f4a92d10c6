"""Mutants of the package's references: each fails the tests listed with it."""

import sys
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor

from nvfp4_kernels.formats import nvfp4
from nvfp4_kernels.gemm import reference as gemm_reference
from nvfp4_kernels.gemm.call import GemmCall, SiluMulGemmCall
from nvfp4_kernels.gemm.silu_mul import reference as silu_mul_gemm_reference
from tests.mutants import Check, Mutant
from tests.mutants.kernels import check_noticed, each_test
from tests.test_kernels import test_against_producers, test_nvfp4_format, test_scale_layout
from tests.test_kernels.gemm import test_gemm
from tests.test_kernels.gemm.silu_mul import test_silu_mul_gemm
from tests.test_kernels.quantize import test_quantize

# Originals that mutants call: these names keep the package's functions during a mutant.
encode_e2m1, decode_e2m1 = nvfp4.encode_e2m1, nvfp4.decode_e2m1
to_blocked, from_blocked = nvfp4.to_blocked, nvfp4.from_blocked
gemm, silu_mul_gemm = gemm_reference.gemm, silu_mul_gemm_reference.silu_mul_gemm


def swap_nibbles(data: Tensor) -> Tensor:
    return data << 4 | data >> 4


def round_half_up(x: Tensor) -> Tensor:
    midpoints = torch.tensor([0.25, 0.75, 1.25, 1.75, 2.5, 3.5, 5.0])
    code = torch.bucketize(x.abs(), midpoints, right=True).to(torch.uint8)
    code |= torch.signbit(x).to(torch.uint8) << 3
    return code[..., 0::2] | code[..., 1::2] << 4


def decode_as_integers(data: Tensor) -> Tensor:
    codes = torch.stack([data & 15, data >> 4], -1).flatten(-2)
    return torch.where(codes < 8, codes.float(), 8 - codes.float())


def pad_only(scales: Tensor) -> Tensor:
    """Mutant: linear bytes in whole atoms, not permuted."""
    *batch, rows, cols = scales.shape
    shape = nvfp4.blocked_shape(rows, cols)
    padded = scales.view(torch.uint8).new_zeros(*batch, shape[0] * 128, shape[1] * 4)
    padded[..., :rows, :cols] = scales.view(torch.uint8)
    return padded.view(*batch, *shape).view(scales.dtype)


def read_linearly(blocked: Tensor, rows: int, cols: int) -> Tensor:
    *batch, row_tiles, col_tiles, _, _ = blocked.shape
    linear = blocked.reshape(*batch, row_tiles * 128, col_tiles * 4)
    return linear[..., :rows, :cols].contiguous()


def read_neighbour(blocked: Tensor, rows: int, cols: int) -> Tensor:
    return from_blocked(blocked.view(torch.uint8), rows, cols).roll(1, -1).view(blocked.dtype)


def block_4x32(scales: Tensor) -> Tensor:
    """Mutant: row r at [r//4, r%4] of its atom instead of [r%32, r//32]."""
    padded = pad_only(scales)
    *batch, row_tiles, col_tiles, _, _ = padded.shape
    atoms = padded.view(torch.uint8).view(*batch, row_tiles, 32, 4, col_tiles, 4)
    atoms = atoms.movedim(-2, -4).reshape(*batch, row_tiles, col_tiles, 32, 16)
    return atoms.view(scales.dtype)


def read_4x32(blocked: Tensor, rows: int, cols: int) -> Tensor:
    *batch, row_tiles, col_tiles, _, _ = blocked.shape
    atoms = blocked.view(torch.uint8).reshape(*batch, row_tiles, col_tiles, 32, 4, 4)
    linear = atoms.movedim(-4, -2).reshape(*batch, row_tiles * 128, col_tiles * 4)
    return linear[..., :rows, :cols].contiguous().view(blocked.dtype)


def leave_padding(scales: Tensor) -> Tensor:
    *batch, rows, cols = scales.shape
    padded = scales.view(torch.uint8).new_empty(*batch, -(-rows // 128) * 128, -(-cols // 4) * 4)
    padded[..., :rows, :cols] = scales.view(torch.uint8)
    return to_blocked(padded).view(scales.dtype)


def gemm_with(**changes: Callable[[GemmCall], Any]) -> Callable[[GemmCall], Any]:
    """Mutant: ``gemm``'s reference with some of its arguments changed."""

    def mutant(call: GemmCall) -> Any:
        return gemm(call._replace(**{name: change(call) for name, change in changes.items()}))

    return mutant


def largest_alpha(call: GemmCall) -> Tensor:
    return call.alpha.max().repeat(len(call.alpha))


def bias_times_alpha(call: GemmCall) -> Tensor | None:
    return call.bias if call.bias is None else call.bias * call.alpha[0]


def swap_projections(call: SiluMulGemmCall) -> Any:
    b1, b1_scales, b2, b2_scales = call[2:6]
    return silu_mul_gemm(call._replace(b1=b2, b1_scales=b2_scales, b2=b1, b2_scales=b1_scales))


def bindings(original: object) -> Iterator[tuple[object, str]]:
    """Yield every module attribute of the package and its tests that is ``original``."""
    for name, module in list(sys.modules.items()):
        if name.startswith(("nvfp4_kernels", "tests.test_kernels")) and name != __name__:
            for attribute, value in list(vars(module).items()):
                if value is original:
                    yield module, attribute


def replaced(original: object, value: object, tests: tuple[Check, ...]) -> Mutant:
    """Mutant with ``value`` for ``original`` in every module; each of ``tests`` must then fail."""

    def change(patch: pytest.MonkeyPatch) -> None:
        for place in bindings(original):
            patch.setattr(*place, value)

    return Mutant(change, on=tests)


BYTES = test_nvfp4_format.test_every_byte_decodes
NIBBLES = test_nvfp4_format.test_low_nibble_is_the_even_element
CODES = test_nvfp4_format.test_codes_are_not_integers


def product(name: str) -> Callable[[], None]:
    return partial(test_gemm.test_exact_on_grid_values, test_gemm.CASES[name])


def random_product(name: str) -> Callable[[], None]:
    return partial(test_gemm.test_close_on_random_values, test_gemm.CASES[name])


def gated_product(name: str) -> Callable[[], None]:
    return partial(test_silu_mul_gemm.test_exact_on_grid_values, test_silu_mul_gemm.CASES[name])


def quantized(name: str) -> Callable[[], None]:
    return partial(test_quantize.test_quantize_per_token, test_quantize.CASES[name])


def modelopt(name: str) -> Callable[[], None]:
    return partial(test_against_producers.test_frozen_modelopt, name)


def rounding(magnitude: float) -> Callable[[], None]:
    return partial(test_nvfp4_format.test_rounding, magnitude, -1.0)


def offsets(name: str) -> Callable[[], None]:
    return partial(test_scale_layout.test_every_offset, *test_scale_layout.SHAPES[name])


def padding(name: str) -> Callable[[], None]:
    return partial(test_scale_layout.test_padding_is_zero, *test_scale_layout.SHAPES[name])


MUTANTS = {
    "nibbles swapped by the encoder": replaced(
        encode_e2m1,
        lambda x: swap_nibbles(encode_e2m1(x)),
        (NIBBLES, modelopt("bfloat16 gauss"), quantized("one block")),
    ),
    "nibbles swapped by the decoder": replaced(
        decode_e2m1,
        lambda data: decode_e2m1(swap_nibbles(data)),
        # Products read both operands the same way, so only a 16-bit activation shows the mutant.
        (NIBBLES, BYTES, product("w4a16 bf16"), random_product("w4a16 fp16")),
    ),
    "codes decoded as integers": replaced(
        decode_e2m1,
        decode_as_integers,
        (CODES, BYTES, product("one tile"), random_product("one tile"), gated_product("one tile")),
    ),
    "ties rounded up": replaced(
        encode_e2m1,
        round_half_up,
        (rounding(0.25), rounding(1.25), rounding(2.5), rounding(5.0), modelopt("float32 ties")),
    ),
    "scales padded but not permuted": replaced(
        to_blocked,
        pad_only,
        (offsets("one atom"), offsets("ragged both"), quantized("one tile")),
    ),
    "scales read as if linear": replaced(
        from_blocked,
        read_linearly,
        (product("one tile"), random_product("ragged"), gated_product("w4a16 bf16")),
    ),
    "atoms of 4 by 32 written": replaced(
        to_blocked,
        block_4x32,
        (offsets("one atom"), offsets("less than a quarter"), quantized("several row tiles")),
    ),
    "atoms of 4 by 32 read": replaced(
        from_blocked,
        read_4x32,
        (product("one tile"), random_product("ragged"), product("batched weight")),
    ),
    "padding left uninitialised": replaced(
        to_blocked,
        leave_padding,
        (padding("ragged rows"), padding("ragged columns"), quantized("one row")),
    ),
    "the neighbouring block's scale": replaced(
        from_blocked,
        read_neighbour,
        (product("w4a16 bf16"), random_product("one row"), product("one tile")),
    ),
    "one alpha, the largest, for all shards": replaced(
        gemm,
        gemm_with(alpha=largest_alpha),
        (
            product("qkv shards"),
            random_product("shards inside an atom"),
            partial(test_gemm.test_shards_with_their_own_global_scales, 2.0),
            partial(test_gemm.test_shards_with_their_own_global_scales, 8.0),
        ),
    ),
    "row scale left out": replaced(
        gemm,
        gemm_with(row_scale=lambda call: None),
        (product("row scale"), test_quantize.test_per_token_row_scales_fit_gemm),
    ),
    "bias multiplied by alpha": replaced(
        gemm,
        gemm_with(bias=bias_times_alpha),
        (product("bias"), random_product("everything")),
    ),
    "gate and up exchanged": replaced(
        silu_mul_gemm,
        swap_projections,
        (
            gated_product("one tile"),
            partial(
                test_silu_mul_gemm.test_close_on_random_values,
                test_silu_mul_gemm.CASES["w4a16 bf16"],
            ),
        ),
    ),
}


@each_test(MUTANTS)
def test_mutant_is_found(mutant: Mutant, test: Check) -> None:
    check_noticed(mutant, test)
