"""Mutation tests of decode attention: each mutant is reported, or its results are wrong."""

from pathlib import Path

import pytest
import torch

from nvfp4_kernels import decode_attention
from tests import devices
from tests.emulator import STANDARD
from tests.emulator.findings import MissingDependencyWait
from tests.test_kernels.attention.decode.decode_cases import Case, arguments, case, check_kernel
from tests.test_kernels.attention.decode.decode_shapes import Chosen
from tests.test_kernels.attention.decode.mutants import ALONE, CLUSTER, MISTAKES, WIDE
from tests.test_kernels.changed_source import changed_source
from tests.test_kernels.mistakes import NOTHING, first_noticed, loaded_ptx

PACKAGE = "nvfp4_kernels.attention.decode.sm90"
CPU = torch.device("cpu")


def outcome(on: tuple[Chosen, Case]) -> str:
    """Return the first finding over all schedules."""
    chosen, given = on

    def check() -> None:
        with pytest.MonkeyPatch.context() as patch:
            chosen.use(patch)
            check_kernel(given, CPU)

    return first_noticed(check, arch="sm_90")


@pytest.mark.parametrize("name", MISTAKES)
def test_caught(name: str, tmp_path: Path) -> None:
    devices.cutlass_or_skip()
    mistake = MISTAKES[name]
    with changed_source(PACKAGE, tmp_path / "sm90", mistake.module, mistake.right, mistake.wrong):
        assert outcome(mistake.on) == mistake.caught


@pytest.mark.parametrize("on", [ALONE, CLUSTER, WIDE], ids=["alone", "cluster", "wide"])
def test_nothing_to_catch(on: tuple[Chosen, Case], tmp_path: Path) -> None:
    devices.cutlass_or_skip()
    with changed_source(PACKAGE, tmp_path / "sm90"):
        assert outcome(on) == NOTHING


def two_layers() -> None:
    """Launch two dependent layers; the second one's queries are the first one's result."""
    given, then = (arguments(case(20, 3).problem(), CPU) for _ in range(2))
    with devices.emulated_ops(STANDARD[0], "sm_90"):
        decode_attention(**then | {"q": decode_attention(**given)})


WAIT = "ptx.griddepcontrol(ptx.GridDepAction.WAIT)"


def test_a_kernel_waits_for_the_one_before(tmp_path: Path) -> None:
    devices.cutlass_or_skip()
    with changed_source(PACKAGE, tmp_path / "right"):
        two_layers()
    with (
        changed_source(PACKAGE, tmp_path / "wrong", "kernel", WAIT, "pass"),
        pytest.raises(MissingDependencyWait, match=r"griddepcontrol\.wait before the read"),
    ):
        two_layers()


def test_the_next_kernel_starts_after_the_wait(tmp_path: Path) -> None:
    devices.cutlass_or_skip()
    with changed_source(PACKAGE, tmp_path / "right"):
        for ptx in loaded_ptx(two_layers):
            launches = ptx.index("griddepcontrol.launch_dependents")
            assert ptx.rfind("griddepcontrol.wait") < launches


def test_the_kernel_before_must_not_write_the_cache() -> None:
    """The kernel reads older keys before its predecessor has ended, as the op documents."""
    devices.cutlass_or_skip()
    given = arguments(case(20, 3).problem(), CPU)
    with devices.emulated_ops(STANDARD[0], "sm_90"):
        decode_attention(**given)
        with pytest.raises(MissingDependencyWait, match=r"griddepcontrol\.wait before the read"):
            decode_attention(**given)
