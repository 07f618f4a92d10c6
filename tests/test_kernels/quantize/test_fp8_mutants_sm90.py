"""Mutants of the kernels that write E4M3 rows: each is reported, or its results are wrong."""

from collections.abc import Callable
from functools import partial

import pytest
import torch

from nvfp4_kernels import PerTokenFp8, StaticFp8, add_rms_norm_quantize, quantize, silu_mul_quantize
from tests.emulator import EAGER
from tests.mutants import WRONG, Mutant, Patch
from tests.mutants.kernels import (
    WAIT,
    Room,
    check_caught,
    check_dependency_wait,
    check_launches_before_wait,
    check_nothing_to_catch,
)
from tests.test_kernels.quantize import test_quantize_fp8_sm90 as plain
from tests.test_kernels.quantize.rms_norm import test_rms_norm_quantize_fp8 as norms
from tests.test_kernels.quantize.silu_mul import test_silu_mul_quantize_fp8 as activations
from tests.test_kernels.rowwise.row_cases import BF16, Case

QUANTIZE = Room("nvfp4_kernels.quantize")
NORM = Room("nvfp4_kernels.quantize.rms_norm")
SILU_MUL = Room("nvfp4_kernels.quantize.silu_mul")
ROOMS = (QUANTIZE, NORM, SILU_MUL, Room("nvfp4_kernels.norm"))


class Shared(Room):
    """Modules that the kernels share; an edit makes the kernels be imported anew, too."""

    def edited(self, module: str = "", right: str = "", wrong: str = "") -> Patch:
        def apply(patch: pytest.MonkeyPatch) -> None:
            for room in ROOMS:  # first: their originals, which come back, have the right modules
                room.edited()(patch)
            Room.edited(self, module, right, wrong)(patch)

        return apply


VECTORS = Shared("nvfp4_kernels.device.row_vectors")
CPU = torch.device("cpu")
HOW = {"schedules": [EAGER], "arch": "sm_90"}

# Ragged rows: the last group is padded, the last warp has idle lanes.
RAGGED = Case(3, 16 * 37)
LONG = Case(2, 8208)


def static() -> None:
    plain.check(RAGGED.random(), CPU)


def per_token() -> None:
    plain.check_per_token(RAGGED.random(), CPU)


def steps() -> None:
    """Check rows of which a thread has several vectors."""
    plain.check_per_token(LONG.random(), CPU)


def parts() -> None:
    """Check rows of which a CTA has a part."""
    plain.check(Case(3, 2096).random(), CPU)


def norm() -> None:
    norms.check_exact(RAGGED, CPU)


def norm_steps() -> None:
    """Check rows of which a thread has several vectors."""
    norms.check_exact(LONG, CPU)


def silu_mul() -> None:
    activations.check_exact(activations.grid_input(RAGGED), CPU)


Check = Callable[[], None]


def edited(module: str, right: str, wrong: str, on: Check = static, caught: str = WRONG) -> Mutant:
    """Mutant of a module that the kernels share; the kernel of ``quantize`` runs."""
    return Mutant(VECTORS.edited(module, right, wrong), caught, on)


def of(room: Room, right: str, wrong: str, on: Check, caught: str = WRONG) -> Mutant:
    """Mutant of an op's kernel."""
    return Mutant(room.edited("sm90", right, wrong), caught, on)


MUTANTS = {
    "halves exchanged with the wrong lane": edited("fp8", "words[1]), 1)", "words[1]), 4)"),
    "words exchanged with the wrong lane": edited("fp8", "odd_word), 2)", "odd_word), 4)"),
    "bytes of the halves exchanged": edited(
        "fp8", "Int32(0x1504), Int32(0x5140)", "Int32(0x5140), Int32(0x1504)"
    ),
    "bytes of a pair exchanged": edited(
        "fp8", "Int32(0x3726), Int32(0x7362)", "Int32(0x2637), Int32(0x6273)"
    ),
    "own word given away": edited("fp8", "half, words[1], words[0]", "half, words[0], words[1]"),
    "quarters exchanged": edited(
        "fp8", "lane % 2 * 32 + lane // 2 % 2 * 16", "lane % 2 * 16 + lane // 2 % 2 * 32"
    ),
    "padding not written": edited("fp8", "if group < place.k:", "if place.has(step):"),
    "padding not zero": edited("fp8", "place.has(step))\n", "Boolean(True))\n"),
    "rows K bytes apart": edited(
        "fp8", "place.row * padded", "place.row * place.k", caught="DataRace"
    ),
    "a division by the scale": edited(
        "fp8",
        "widen(elements) * inverse",
        "widen(elements) / scale",
        partial(plain.test_the_reciprocal_multiplies, CPU),
    ),
    "no smallest scale": edited(
        "fp8",
        "amax / Float32(FP8_MAX), SMALLEST_TOKEN_SCALE",
        "amax / Float32(FP8_MAX), 0.0",
        partial(plain.test_the_smallest_and_the_largest_rows, CPU),
    ),
    "scale of NaN": edited(
        "fp8",
        "cutlass.select_(amax > 0.0, scale, Float32(1.0))",
        "scale",
        partial(plain.test_not_finite_rows, torch.nan, CPU),
    ),
    "NaN left out of the maximum": edited(
        "reduction",
        "fmax(a, b, nan=True)",
        "fmax(a, b)",
        partial(plain.test_not_finite_rows, torch.nan, CPU),
    ),
    "scale of every thread": edited(
        "fp8", "if place.first == 0:", "if place.first >= 0:", per_token, "DataRace"
    ),
    "maximum of a warp": edited("reduction", "if lane < warps:", "if lane < 1:", per_token),
    "no barrier in the reduction": edited(
        "reduction", "ptx.barrier_cta_sync()", "pass", per_token, "UninitialisedRead"
    ),
    "loads past the row's end": edited(
        "place",
        "cutlass.min(place.element(step), place.k - VECTOR)",
        "place.element(step)",
        caught="OutOfBounds",
    ),
    "steps overlap": edited(
        "place", "step * self.tile.threads * VECTOR", "step * VECTOR", steps, "DataRace"
    ),
    "parts overlap": edited(
        "place", "cta % parts * tile.elements", "cta % parts * VECTOR", parts, "DataRace"
    ),
    "a part less": edited(
        "kernel", "cute.ceil_div(out.k, self.tile.elements)", "out.k // self.tile.elements", parts
    ),
    "the first row for all": of(QUANTIZE, "place.row * arguments.stride", "Int64(0)", static),
    "gate and up exchanged": of(
        SILU_MUL, "(gate, gate + arguments.out.k)", "(gate + arguments.out.k, gate)", silu_mul
    ),
    "up of the next element": of(
        SILU_MUL, "gate + arguments.out.k)", "gate + arguments.out.k - 8)", silu_mul
    ),
    "no residual": of(NORM, "sums[-1] = sums[-1] + before.to(Float32)", "pass", norm),
    "residual of x's stride": of(NORM, "place.row * inputs.residual_stride", "Int64(0)", norm),
    "mean over the CTA's elements": of(
        NORM, "/ place.k.to(Float32)", "/ Float32(place.tile.elements)", norm
    ),
    "no eps": of(
        NORM, "sqrt(mean + arguments.eps)", "sqrt(mean)", partial(norms.test_rows_of_zeros, CPU)
    ),
    "weight not loaded by steps": of(
        NORM,
        "load(place, step, arguments.inputs.weight, Int64(0))",
        "load(place, 0, arguments.inputs.weight, Int64(0))",
        norm_steps,
    ),
    "normalised value not rounded": of(
        NORM,
        "((sums[step] * inverse).to(early[step].dtype) * early[step])",
        "(sums[step] * inverse * early[step].to(Float32))",
        norm,
    ),
    "rounded sum normalised": of(
        NORM,
        "sums[step] * inverse",
        "sums[step].to(TYPES[self.dtype]).to(Float32) * inverse",
        partial(norms.test_random_values_are_those_of_add_rms_norm, 208, BF16, CPU),
    ),
}


@pytest.mark.parametrize("name", MUTANTS)
def test_caught(name: str) -> None:
    check_caught(MUTANTS[name], MUTANTS[name].on, **HOW)


@pytest.mark.parametrize("check", [static, per_token, steps, parts, norm, norm_steps, silu_mul])
def test_nothing_to_catch(check: Check) -> None:
    check_nothing_to_catch(check, VECTORS.edited(), **HOW)


def twice() -> None:
    """Launch two dependent kernels; the second one's input is the first one's result."""
    _, row_scale = quantize(torch.randn(32, 64), PerTokenFp8())
    quantize(row_scale.view(2, 16), PerTokenFp8())


def scaled() -> None:
    """Launch two dependent kernels; the second one's scale is the first one's result."""
    _, row_scale = quantize(torch.randn(32, 64), PerTokenFp8())
    quantize(torch.randn(2, 16), StaticFp8(row_scale[0]))


def activated() -> None:
    """Launch two dependent kernels; the second one has the first one's result for gate and up."""
    _, row_scale = quantize(torch.randn(32, 64), PerTokenFp8())
    silu_mul_quantize(row_scale.view(1, 32), PerTokenFp8())


def normalised() -> None:
    """Launch two dependent norms; the second one's residual is the first one's result."""
    x, weight = torch.randn(3, 64, dtype=BF16), torch.ones(64, dtype=BF16)
    *_, residual = add_rms_norm_quantize(x, x, weight, 1e-5, PerTokenFp8())
    add_rms_norm_quantize(x, residual, weight, 1e-5, PerTokenFp8())


@pytest.mark.parametrize("launches", [twice, scaled, activated, normalised])
def test_a_kernel_waits_for_the_one_before(launches: Check) -> None:
    without_wait = VECTORS.edited("kernel", WAIT, "pass")
    check_dependency_wait(launches, without_wait=without_wait, arch="sm_90")


def test_the_next_kernel_starts_before_the_wait() -> None:
    """A product can then fetch weights before the activations are there; results cannot show it."""
    check_launches_before_wait(twice, VECTORS, "kernel", "sm_90")
