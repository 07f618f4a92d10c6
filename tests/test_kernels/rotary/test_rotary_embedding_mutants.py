"""Mutants of the rotary embedding: each mutant is reported, or its results are wrong."""

from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch

from nvfp4_kernels import rotary_embedding
from nvfp4_kernels.rotary import reference
from tests import devices
from tests.emulator import EAGER
from tests.emulator.findings import MissingDependencyWait
from tests.mutants import WRONG, Mutant
from tests.mutants.kernels import (
    WAIT,
    Room,
    check_caught,
    check_dependency_wait,
    check_launches_before_wait,
    check_nothing_to_catch,
    check_noticed,
)
from tests.test_kernels.rotary import test_rotary_embedding
from tests.test_kernels.rotary.rotary_cases import Case, check_kernel

KERNEL = Room("nvfp4_kernels.rotary")
CPU = torch.device("cpu")

# The last CTA of a token has one head less than the others.
FEW = Case(3, 31, 6, 128, 96)
MANY = Case(520, 3, 2, 32, 32)


def edited(right: str, wrong: str, caught: str = WRONG, on: Case = FEW) -> Mutant:
    return Mutant(KERNEL.edited("sm90", right, wrong), caught, on)


MUTANTS = {
    "sine negated": edited("low * cos - high * sin", "low * cos + high * sin"),
    "sine of the other half negated": edited("high * cos + low * sin", "high * cos - low * sin"),
    "cosine and sine exchanged": edited("at: Int32, cos: Vector, sin:", "at: Int32, sin, cos:"),
    "rounded before the sum": edited(
        "low * cos - high * sin", "(low * cos).to(TYPES[self.dtype]).to(Float32) - high * sin"
    ),
    "partner 8 elements off": edited(
        "head.source.load(at + half,", "head.source.load(at + half - PIECE,"
    ),
    "partner stored 8 elements off": edited(
        "store(rotated_high, at + half,", "store(rotated_high, at + half + PIECE,", "DataRace"
    ),
    "partners D/2 apart": edited(
        "half = self.tile.rotary_dim //", "half = self.tile.head_dim //", "DataRace"
    ),
    "sines 8 elements off": edited(
        "start + tile.rotary_dim // 2", "start + tile.rotary_dim // 2 - PIECE"
    ),
    "cosines of the first vector for all": edited("vector % tile.rotary_threads * PIECE", "0"),
    "position taken for the token": edited(
        "position * tile.rotary_dim", "Int64(token) * tile.rotary_dim"
    ),
    "position of the first token for all": edited("load(Int64(token))", "load(Int64(0))"),
    "k's rows by q's token stride": edited(
        "k=_heads(k, k_out)", "k=_heads(k, k_out)._replace(token_stride=q.stride(1))"
    ),
    "k's heads by q's number": edited("inside - queries.num_heads,", "inside,", "OutOfBounds"),
    "k's results as far apart as the rows read": edited(
        "Int64(token) * Int64(self.num_heads)",
        "Int64(token) * Int64(self.num_heads + 1)",
        "OutOfBounds",
    ),
    "a head more": edited("head < heads)", "head <= heads)", "DataRace"),
    "the last head left out": edited("head < heads)", "head < heads - 1)"),
    "tail from 0 on": edited(
        "tile.rotary_dim + (vector - tile.rotary_threads)",
        "(vector - tile.rotary_threads)",
        "DataRace",
    ),
    "tail not copied": edited(
        "heads[step].target.store(vectors[step], at, alignment=ALIGNMENT)", "pass"
    ),
    "second head of a thread beside the first": edited(
        "first + step * tile.slots", "first + step", on=MANY
    ),
    "heads of the first CTA for all": edited("group * tile.heads + slot", "slot", "DataRace"),
}


HOW = {"schedules": [EAGER], "arch": "sm_90"}


@pytest.mark.parametrize("name", MUTANTS)
def test_caught(name: str) -> None:
    check_caught(MUTANTS[name], partial(check_kernel, MUTANTS[name].on, CPU), **HOW)


@pytest.mark.parametrize("case", [FEW, MANY], ids=["few", "many"])
def test_nothing_to_catch(case: Case) -> None:
    check_nothing_to_catch(partial(check_kernel, case, CPU), KERNEL.edited(), **HOW)


def twice() -> None:
    """Launch two dependent kernels; the second one's inputs are the first one's result."""
    positions, q, k, cache = Case(2).arguments()
    rotary_embedding(positions, *rotary_embedding(positions, q, k, cache), cache)


def test_a_kernel_waits_for_the_one_before() -> None:
    check_dependency_wait(twice, without_wait=KERNEL.edited("sm90", WAIT, "pass"), arch="sm_90")


def test_the_next_kernel_starts_before_the_wait() -> None:
    """Attention can then fetch keys before the projection has ended; results cannot show it."""
    check_launches_before_wait(twice, KERNEL, "sm90", "sm_90")


def test_the_kernel_before_must_not_write_the_cache() -> None:
    """Positions, cosines and sines are read before the preceding kernel ends, as documented."""
    devices.cutlass_or_skip()
    positions, q, k, cache = Case(2, 1, 1).arguments()
    with devices.emulated_ops(EAGER, "sm_90"):
        written, _ = rotary_embedding(positions, q, k, cache)
        with pytest.raises(MissingDependencyWait, match=r"griddepcontrol\.wait before the read"):
            rotary_embedding(positions.clamp(max=1), q, k, written[:, 0])


rotated = reference.rotate
REFERENCE_MUTANTS: dict[str, Callable[..., Any]] = {
    "sine negated": lambda x, cos, sin: rotated(x, cos, -sin),
    "cosine and sine exchanged": lambda x, cos, sin: rotated(x, sin, cos),
    "neighbours for partners": lambda x, cos, sin: rotated(
        x.unflatten(-1, (-1, 2)).transpose(-1, -2).flatten(-2), cos, sin
    ),
    "tail left out": lambda x, cos, sin: torch.cat(
        (rotated(x, cos, sin)[..., : 2 * cos.shape[-1]], 0 * x[..., 2 * cos.shape[-1] :]), -1
    ),
}


@pytest.mark.parametrize("name", REFERENCE_MUTANTS)
def test_caught_in_the_reference(name: str) -> None:
    mutant = Mutant.replaced(reference, "rotate", REFERENCE_MUTANTS[name])
    check_noticed(mutant, lambda: test_rotary_embedding.test_reference("partial, D = 64"))
    check_noticed(mutant, test_rotary_embedding.test_formula_on_integers)
