"""Mutants of decode attention: each mutant is reported, or its results are wrong."""

from functools import partial

import pytest
import torch

from nvfp4_kernels import decode_attention
from tests import devices
from tests.emulator import EAGER
from tests.emulator.findings import MissingDependencyWait
from tests.mutants import Check, Patch
from tests.mutants.kernels import (
    check_caught,
    check_dependency_wait,
    check_nothing_to_catch,
    compiled_anew,
    loaded_ptx,
)
from tests.test_kernels.attention.decode.decode_cases import Case, arguments, case, check_kernel
from tests.test_kernels.attention.decode.decode_mutants import (
    ALONE,
    CLUSTER,
    FP8,
    KERNEL,
    MUTANTS,
    WIDE,
)
from tests.test_kernels.attention.decode.decode_shapes import Chosen

CPU = torch.device("cpu")


def checked(on: tuple[Chosen, Case]) -> tuple[Check, Patch]:
    """Check of a case, and the patch that chooses its tile."""
    chosen, given = on
    return partial(check_kernel, given, CPU), chosen.use


@pytest.mark.parametrize("name", MUTANTS)
def test_caught(name: str) -> None:
    mutant = MUTANTS[name]
    check_caught(mutant, *checked(mutant.on), arch="sm_90")


@pytest.mark.parametrize(
    "on", [ALONE, CLUSTER, WIDE, FP8], ids=["alone", "cluster", "wide", "E4M3"]
)
def test_nothing_to_catch(on: tuple[Chosen, Case]) -> None:
    check, use = checked(on)
    check_nothing_to_catch(check, KERNEL.edited(), use, arch="sm_90")


def two_layers() -> None:
    """Launch two dependent layers; the second one's queries are the first one's result."""
    given, then = (arguments(case(20, 3).problem(), CPU) for _ in range(2))
    decode_attention(**then | {"q": decode_attention(**given)})


def test_a_kernel_waits_for_the_one_before() -> None:
    wait = KERNEL.edited("kernel", "ptx.griddepcontrol(ptx.GridDepAction.WAIT)", "pass")
    check_dependency_wait(two_layers, without_wait=wait, arch="sm_90")


def test_the_next_kernel_starts_after_the_wait() -> None:
    with compiled_anew(), devices.emulated_ops(EAGER, "sm_90"):
        for ptx in loaded_ptx(two_layers):
            launches = ptx.index("griddepcontrol.launch_dependents")
            assert ptx.rfind("griddepcontrol.wait") < launches


def test_the_kernel_before_must_not_write_the_cache() -> None:
    """The kernel reads older keys before its predecessor has ended, as the op documents."""
    devices.cutlass_or_skip()
    given = arguments(case(20, 3).problem(), CPU)
    with devices.emulated_ops(EAGER, "sm_90"):
        decode_attention(**given)
        with pytest.raises(MissingDependencyWait, match=r"griddepcontrol\.wait before the read"):
            decode_attention(**given)
