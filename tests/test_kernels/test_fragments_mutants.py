"""Mutants of the fragment layout: each fails the tests listed with it.

Equal changes to packing and unpacking cancel out in every product; only tests of the bits'
positions notice such mutants, and a kernel would read other numbers.
"""

from collections.abc import Callable
from functools import partial
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from nvfp4_kernels.dispatch import Kernel
from nvfp4_kernels.formats import fragments
from tests.mutants import Check, Mutant
from tests.mutants.kernels import check_noticed, each_test
from tests.test_kernels import test_fragments
from tests.test_kernels.gemm import test_fragments_product

# The original functions, whatever replaces them.
exact = SimpleNamespace(**vars(fragments))

BITS = partial(test_fragments.test_every_bit, *test_fragments.SHAPES["ragged both"])
ONE_BLOCK = partial(test_fragments.test_every_bit, *test_fragments.SHAPES["one block"])
PADDING = partial(test_fragments.test_padding_is_zero, *test_fragments.SHAPES["ragged K"])
SCALES, ANY_BYTES = test_fragments.test_every_scale, test_fragments.test_any_bytes_keep_their_values
ROUND_TRIP = test_fragments.test_round_trip


def product(name: str) -> Callable[[], None]:
    case = test_fragments_product.CASES[name]
    return partial(test_fragments_product.test_exact_on_grid_values, case)


def swap_rows(codes: Tensor) -> Tensor:
    """Exchange rows g and g + 8 of each warp."""
    return codes.unflatten(1, (-1, 2, 8)).flip(2).flatten(1, 3)


def swap_steps(scales: Tensor) -> Tensor:
    """Exchange the scales of neighbouring blocks."""
    return scales.unflatten(2, (-1, 2)).flip(3).flatten(2, 3)


def transpose_lanes(data: Tensor) -> Tensor:
    """Move lane 4 g + t to 8 t + g."""
    return data.unflatten(4, (8, 4)).transpose(4, 5).flatten(4, 5)


def restore_lanes(data: Tensor) -> Tensor:
    return data.unflatten(4, (4, 8)).transpose(4, 5).flatten(4, 5)


def big_endian(data: Tensor) -> Tensor:
    return data.unflatten(-1, (-1, 4)).flip(-1).flatten(-2)


def no_subnormals(device: torch.device) -> Tensor:
    codes = exact._scale_codes(device)
    codes[:8] = codes[8]
    return codes


def without_sign(data: Tensor, scales: Tensor) -> Any:
    raw = scales.view(torch.uint8) & 0x7F
    return exact.to_fragments(data, raw.view(torch.float8_e4m3fn))


def zeros_kept(data: Tensor, scales: Tensor) -> Any:
    raw = scales.view(torch.uint8)
    raw = torch.where(raw & 0x7F == 0, raw | 1, raw)
    return exact.to_fragments(data, raw.view(torch.float8_e4m3fn))


def always(kernel: Kernel, layout: str) -> bool:
    return True


def replaced(name: str, value: object, tests: tuple[Check, ...]) -> Mutant:
    return Mutant.replaced(fragments, name, value, tests)


def both(name: str, change: Callable[..., Any], undo: Callable[..., Any], tests: Any) -> Mutant:
    """Mutant that changes the packed bits, and undoes the change when unpacking."""
    pack, unpack = getattr(exact, f"_pack_{name}"), getattr(exact, f"_unpack_{name}")

    def apply(patch: pytest.MonkeyPatch) -> None:
        patch.setattr(
            fragments, f"_pack_{name}", lambda x, *tables: change(lambda y: pack(y, *tables), x)
        )
        patch.setattr(fragments, f"_unpack_{name}", lambda x: undo(unpack, x))

    return Mutant(apply, on=tests)


MUTANTS = {
    "rows g and g + 8 exchanged": both(
        "data", lambda f, x: f(swap_rows(x)), lambda f, x: swap_rows(f(x)), (BITS, ONE_BLOCK)
    ),
    "lanes counted down t first": both(
        "data", lambda f, x: transpose_lanes(f(x)), lambda f, x: f(restore_lanes(x)), (BITS,)
    ),
    "words big-endian": both(
        "data", lambda f, x: big_endian(f(x)), lambda f, x: f(big_endian(x)), (BITS, ONE_BLOCK)
    ),
    "words written big-endian, read little-endian": replaced(
        "_pack_data",
        lambda *x: big_endian(exact._pack_data(*x)),
        (BITS, ROUND_TRIP, product("ragged")),
    ),
    "scales of neighbouring blocks exchanged": both(
        "scales", lambda f, x: f(swap_steps(x)), lambda f, x: swap_steps(f(x)), (BITS,)
    ),
    "scales written for the neighbouring blocks": replaced(
        "_pack_scales",
        lambda x: exact._pack_scales(swap_steps(x)),
        (BITS, ROUND_TRIP, product("ragged")),
    ),
    "scales of rows g and g + 8 exchanged": both(
        "scales", lambda f, x: f(swap_rows(x)), lambda f, x: swap_rows(f(x)), (BITS,)
    ),
    "two pairs' signs exchanged": replaced(
        "ROTATIONS",
        ((6, 2, 2, 2), (2, 6, 6, 6), *fragments.ROTATIONS[2:]),
        (BITS, partial(test_fragments.test_rotations_and_masks_make_bfloat16, 0, [(2, 0x81C0)])),
    ),
    "magnitudes' low bits exchanged": replaced("TARGETS", (15, 8, 6, 7), (BITS,)),
    "scales one bit higher": replaced("SCALE_BIT", 5, (BITS, ONE_BLOCK)),
    "another bias": replaced("EXPONENT_BIAS", 21, (BITS, ONE_BLOCK)),
    "NaN stored as a number": replaced("NAN_SCALE", 0xF7, (SCALES, ANY_BYTES)),
    "subnormal scales flushed": replaced("_scale_codes", no_subnormals, (SCALES, ANY_BYTES)),
    "negative scales' sign lost": Mutant.replaced(
        test_fragments, "to_fragments", without_sign, (SCALES, ANY_BYTES)
    ),
    "elements under zero scales kept": Mutant.replaced(
        test_fragments,
        "to_fragments",
        zeros_kept,
        (SCALES, ANY_BYTES, test_fragments.test_zero_blocks_have_zero_elements),
    ),
    "no scales in the padding": replaced(
        "_pack_scales", lambda x: exact._pack_scales(x * (x != 8)), (PADDING,)
    ),
    "any layout given to any kernel": Mutant.replaced(
        Kernel,
        "takes",
        always,
        (
            test_fragments_product.test_blocked_pair_is_refused_on_sm_90,
            test_fragments_product.test_fragments_are_refused_by_a_kernel_of_the_blocked_layout,
        ),
    ),
}


@each_test(MUTANTS)
def test_mutant_is_found(mutant: Mutant, test: Check) -> None:
    check_noticed(mutant, test)
